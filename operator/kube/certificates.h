// Certificates: make a CA, issue leaf certificates, read their dates. EC P-256, PEM in and out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace trireme::kube {

struct KeyPair {
  std::string cert_pem;
  std::string key_pem;  // PKCS#8
};

struct LeafOptions {
  std::string common_name;
  std::vector<std::string> dns_names;
  std::vector<std::string> ip_addresses;
  std::vector<std::string> organizations;  // groups, for Kubernetes client certificates
  bool server = true;                      // else a client certificate
  int64_t valid_seconds = 365 * 86400;
  int64_t start_offset_seconds = -300;  // notBefore relative to now
};

KeyPair make_ca(const std::string& common_name, int64_t valid_seconds = 3650LL * 86400);
KeyPair issue_certificate(const KeyPair& ca, const LeafOptions& options);

struct CertificateDates {
  int64_t not_before_unix_s = 0;
  int64_t not_after_unix_s = 0;
};
// Of the first certificate in the PEM. Throws Error(kData).
CertificateDates certificate_dates(const std::string& cert_pem);
// Does the key belong to the certificate, is it signed by the CA, and does it name the host (DNS name)?
bool certificate_matches(const KeyPair& leaf, const std::string& ca_pem, const std::string& dns_name);

}  // namespace trireme::kube
