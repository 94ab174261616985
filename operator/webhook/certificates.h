// The webhook's certificate: made, stored in a Secret, renewed, and made known to the API server, by the operator
// itself; or read from files that cert-manager keeps.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "operator/kube/certificates.h"
#include "operator/kube/client.h"

namespace trireme::webhook {

struct CertificateOptions {
  // Own certificates:
  std::string ns = "trireme-system";
  std::string secret_name = "trireme-webhook-cert";
  std::string service_name = "trireme-webhook";  // in `ns`; the certificate is for NAME.NS.svc
  std::string status_service_name;               // a second Service that it is for; empty: none
  std::string validating_configuration = "trireme-validating";
  std::string mutating_configuration = "trireme-mutating";
  int64_t ca_valid_seconds = 3650LL * 86400;
  int64_t leaf_valid_seconds = 365LL * 86400;
  // Files instead: both set.
  std::string cert_file;
  std::string key_file;
  std::string ca_file;  // who issued it, for ca_pem(); not there: nobody in particular

  Milliseconds check_interval{600000};
  Milliseconds file_interval{10000};
  Milliseconds retry{5000};
  Milliseconds request_timeout{15000};
  std::function<int64_t()> now_unix_s;  // empty: the system's clock
};

// What the Secret holds.
struct CertificateSet {
  kube::KeyPair ca;
  kube::KeyPair leaf;
};

// Is it good for these names for at least a third of the leaf's life? Pure.
bool is_current(const CertificateSet& set, const std::vector<std::string>& dns_names, int64_t now_unix_s);
// A new leaf, under the old CA while that outlives the leaf, else under a new CA.
CertificateSet renew(const std::optional<CertificateSet>& old, const CertificateOptions& options,
                     const std::vector<std::string>& dns_names, int64_t now_unix_s);

// What a webhook's caBundle should be, as PEM, when it is `current`. Another CA stays beside ours, as replicas may
// still serve a certificate of it, until `settled`: a whole interval ago our CA was this one, so all have looked since.
// Pure.
std::string bundle_for(const std::string& current, const std::string& ca_pem, bool settled);

class CertificateKeeper final {
 public:
  // on_change gets every new pair, first one included, on the keeper's thread (or the caller's of ensure()).
  CertificateKeeper(const kube::Client& client, CertificateOptions options,
                    std::function<void(const kube::KeyPair&)> on_change);
  ~CertificateKeeper();
  CertificateKeeper(const CertificateKeeper&) = delete;
  CertificateKeeper& operator=(const CertificateKeeper&) = delete;

  void start();  // a thread that calls ensure() now and then
  void stop();
  // One round: read or make, store, hand over, patch the configurations. Several replicas may do it at once: the
  // Secret's resourceVersion decides who wins and the others take the winner's. Throws ApiError or Error.
  void ensure();
  bool ready() const;              // a pair was handed over and the configurations know its CA
  int64_t expires_unix_s() const;  // 0: none yet
  bool handed_over() const;        // a pair was, if perhaps the configurations do not know its CA
  // Who vouches for the pair that was handed over; "" before, and where no authority of our own does.
  std::string ca_pem() const;
  std::vector<std::string> dns_names() const;

 private:
  void run();
  void ensure_own();
  void ensure_files();
  CertificateSet read_or_make();
  void patch_configuration(const kube::Resource& resource, const std::string& name, const std::string& ca_pem,
                           bool settled);
  void hand_over(const kube::KeyPair& pair, const std::string& ca_pem);
  int64_t now() const;
  Deadline deadline() const { return Deadline::after(options_.request_timeout); }

  const kube::Client& client_;
  CertificateOptions options_;
  std::function<void(const kube::KeyPair&)> on_change_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  bool ready_ = false;
  int64_t expires_ = 0;
  std::string handed_over_;  // certificate PEM
  std::string ca_pem_;
  std::string told_ca_;  // that the configurations knew after the last round; of the thread that calls ensure()
  std::thread thread_;
};

}  // namespace trireme::webhook
