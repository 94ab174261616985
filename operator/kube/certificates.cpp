#include "operator/kube/certificates.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

#include <ctime>

#include "base/error.h"
#include "operator/kube/tls.h"

namespace trireme::kube {
namespace {

void require(bool ok, const char* what) {
  if (!ok) fail_internal(std::string("certificates: ") + what + ": " + openssl_error());
}

std::string bio_text(BIO* bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  return std::string(data, static_cast<size_t>(size));
}

void add_name(X509_NAME* name, const char* field, const std::string& value) {
  require(X509_NAME_add_entry_by_txt(name, field, MBSTRING_UTF8, reinterpret_cast<const unsigned char*>(value.data()),
                                     static_cast<int>(value.size()), -1, 0) == 1,
          "name");
}

void add_extension(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  std::unique_ptr<X509_EXTENSION, OpenSslFree<X509_EXTENSION_free>> extension(
      X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str()));
  require(extension != nullptr, "extension");
  require(X509_add_ext(certificate, extension.get(), -1) == 1, "extension");
}

// Names go into the extension as objects, not through OpenSSL's configuration syntax: a comma in one must not add
// another.
void add_alternative_names(X509* certificate, const LeafOptions& options) {
  std::unique_ptr<GENERAL_NAMES, OpenSslFree<GENERAL_NAMES_free>> names(GENERAL_NAMES_new());
  const auto push = [&](int type, const void* data, size_t size) {
    GENERAL_NAME* name = GENERAL_NAME_new();
    ASN1_STRING* value = type == GEN_IPADD ? ASN1_OCTET_STRING_new() : ASN1_IA5STRING_new();
    require(ASN1_STRING_set(value, data, static_cast<int>(size)) == 1, "alternative name");
    GENERAL_NAME_set0_value(name, type, value);
    require(sk_GENERAL_NAME_push(names.get(), name) > 0, "alternative name");
  };
  for (const std::string& dns : options.dns_names) push(GEN_DNS, dns.data(), dns.size());
  for (const std::string& ip : options.ip_addresses) {
    unsigned char address[16];
    if (inet_pton(AF_INET, ip.c_str(), address) == 1) {
      push(GEN_IPADD, address, 4);
    } else if (inet_pton(AF_INET6, ip.c_str(), address) == 1) {
      push(GEN_IPADD, address, 16);
    } else {
      fail_user("'" + ip + "' is not an IP address");
    }
  }
  require(X509_add1_ext_i2d(certificate, NID_subject_alt_name, names.get(), 0, 0) == 1, "alternative names");
}

X509Ptr new_certificate(EVP_PKEY* key, int64_t start_offset, int64_t valid_seconds) {
  X509Ptr certificate(X509_new());
  require(certificate != nullptr, "new");
  unsigned char serial[16];
  require(RAND_bytes(serial, sizeof serial) == 1, "random");
  serial[0] = static_cast<unsigned char>((serial[0] & 0x3f) | 0x40);  // positive, never short
  std::unique_ptr<BIGNUM, OpenSslFree<BN_free>> number(BN_bin2bn(serial, sizeof serial, nullptr));
  require(BN_to_ASN1_INTEGER(number.get(), X509_get_serialNumber(certificate.get())) != nullptr, "serial");
  require(X509_set_version(certificate.get(), 2) == 1, "version");
  X509_gmtime_adj(X509_getm_notBefore(certificate.get()), static_cast<long>(start_offset));
  X509_gmtime_adj(X509_getm_notAfter(certificate.get()), static_cast<long>(valid_seconds));
  require(X509_set_pubkey(certificate.get(), key) == 1, "key");
  return certificate;
}

KeyPair finish(X509* certificate, EVP_PKEY* own_key, EVP_PKEY* signing_key) {
  require(X509_sign(certificate, signing_key, EVP_sha256()) > 0, "sign");
  const BioPtr cert(BIO_new(BIO_s_mem()));
  const BioPtr key(BIO_new(BIO_s_mem()));
  require(PEM_write_bio_X509(cert.get(), certificate) == 1, "write");
  require(PEM_write_bio_PKCS8PrivateKey(key.get(), own_key, nullptr, nullptr, 0, nullptr, nullptr) == 1, "write");
  return {bio_text(cert.get()), bio_text(key.get())};
}

int64_t unix_seconds(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) fail_data("a certificate holds a malformed time");
  return timegm(&parts);
}

}  // namespace

KeyPair make_ca(const std::string& common_name, int64_t valid_seconds) {
  const KeyPtr key(EVP_EC_gen("P-256"));
  require(key != nullptr, "key");
  const X509Ptr certificate = new_certificate(key.get(), -300, valid_seconds);
  X509_NAME* name = X509_get_subject_name(certificate.get());
  add_name(name, "CN", common_name);
  require(X509_set_issuer_name(certificate.get(), name) == 1, "issuer");
  add_extension(certificate.get(), certificate.get(), NID_basic_constraints, "critical,CA:TRUE");
  add_extension(certificate.get(), certificate.get(), NID_key_usage, "critical,keyCertSign,cRLSign,digitalSignature");
  add_extension(certificate.get(), certificate.get(), NID_subject_key_identifier, "hash");
  return finish(certificate.get(), key.get(), key.get());
}

KeyPair issue_certificate(const KeyPair& ca, const LeafOptions& options) {
  const auto issuer = make_identity(ca.cert_pem, ca.key_pem, "the CA");
  const KeyPtr key(EVP_EC_gen("P-256"));
  require(key != nullptr, "key");
  const X509Ptr certificate = new_certificate(key.get(), options.start_offset_seconds, options.valid_seconds);
  X509_NAME* name = X509_get_subject_name(certificate.get());
  for (const std::string& organization : options.organizations) add_name(name, "O", organization);
  add_name(name, "CN", options.common_name);
  X509* parent = issuer->certificate.get();
  require(X509_set_issuer_name(certificate.get(), X509_get_subject_name(parent)) == 1, "issuer");
  add_extension(certificate.get(), parent, NID_basic_constraints, "critical,CA:FALSE");
  add_extension(certificate.get(), parent, NID_key_usage, "critical,digitalSignature");
  add_extension(certificate.get(), parent, NID_ext_key_usage, options.server ? "serverAuth" : "clientAuth");
  add_extension(certificate.get(), parent, NID_authority_key_identifier, "keyid");
  if (!options.dns_names.empty() || !options.ip_addresses.empty()) add_alternative_names(certificate.get(), options);
  return finish(certificate.get(), key.get(), issuer->key.get());
}

CertificateDates certificate_dates(const std::string& cert_pem) {
  const auto certificates = parse_certificates(cert_pem, "the certificate");
  return {unix_seconds(X509_get0_notBefore(certificates[0].get())),
          unix_seconds(X509_get0_notAfter(certificates[0].get()))};
}

bool certificate_matches(const KeyPair& leaf, const std::string& ca_pem, const std::string& dns_name) {
  try {
    const auto identity = make_identity(leaf.cert_pem, leaf.key_pem, "the certificate");
    const auto issuers = parse_certificates(ca_pem, "the CA");
    bool is_signed = false;
    for (const X509Ptr& issuer : issuers) {
      is_signed = is_signed || X509_verify(identity->certificate.get(), X509_get0_pubkey(issuer.get())) == 1;
    }
    ERR_clear_error();
    return is_signed && X509_check_host(identity->certificate.get(), dns_name.data(), dns_name.size(), 0, nullptr) == 1;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace trireme::kube
