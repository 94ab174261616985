#include "operator/kube/tls.h"

#include <openssl/err.h>
#include <openssl/pem.h>

#include "base/error.h"

namespace trireme::kube {
namespace {

// An encrypted key must fail, not ask on a terminal.
int no_password(char*, int, int, void*) { return -1; }

BioPtr memory(std::string_view text) { return BioPtr(BIO_new_mem_buf(text.data(), static_cast<int>(text.size()))); }

}  // namespace

std::string openssl_error() {
  const unsigned long code = ERR_get_error();
  ERR_clear_error();
  if (code == 0) return "no detail";
  char text[256];
  ERR_error_string_n(code, text, sizeof text);
  return text;
}

std::vector<X509Ptr> parse_certificates(std::string_view pem, const std::string& what) {
  const BioPtr bio = memory(pem);
  std::vector<X509Ptr> out;
  while (X509* certificate = PEM_read_bio_X509(bio.get(), nullptr, no_password, nullptr)) out.emplace_back(certificate);
  const unsigned long last = ERR_peek_last_error();
  if (out.empty() || (last != 0 && ERR_GET_REASON(last) != PEM_R_NO_START_LINE)) {
    fail_data(what + " holds no valid PEM certificate: " + openssl_error());
  }
  ERR_clear_error();
  return out;
}

KeyPtr parse_private_key(std::string_view pem, const std::string& what) {
  const BioPtr bio = memory(pem);
  KeyPtr key(PEM_read_bio_PrivateKey(bio.get(), nullptr, no_password, nullptr));
  if (!key)
    fail_data(what + " holds no readable PEM private key (an encrypted one is not supported): " + openssl_error());
  return key;
}

StorePtr make_store(std::string_view ca_pem, const std::string& what) {
  StorePtr store(X509_STORE_new());
  for (const X509Ptr& certificate : parse_certificates(ca_pem, what)) {
    if (X509_STORE_add_cert(store.get(), certificate.get()) != 1) fail_data(what + ": " + openssl_error());
  }
  // A CA bundle may hold an intermediate only; it is trusted as it stands.
  X509_STORE_set_flags(store.get(), X509_V_FLAG_PARTIAL_CHAIN);
  return store;
}

std::shared_ptr<const Identity> make_identity(std::string_view cert_pem, std::string_view key_pem,
                                              const std::string& what) {
  auto identity = std::make_shared<Identity>();
  identity->chain = parse_certificates(cert_pem, what + " certificate");
  identity->certificate = std::move(identity->chain.front());
  identity->chain.erase(identity->chain.begin());
  identity->key = parse_private_key(key_pem, what + " key");
  if (X509_check_private_key(identity->certificate.get(), identity->key.get()) != 1) {
    ERR_clear_error();
    fail_data(what + ": the private key does not belong to the certificate");
  }
  return identity;
}

bool use_identity(SSL* ssl, const Identity& identity) {
  if (SSL_use_certificate(ssl, identity.certificate.get()) != 1 || SSL_use_PrivateKey(ssl, identity.key.get()) != 1)
    return false;
  if (SSL_clear_chain_certs(ssl) != 1) return false;
  for (const X509Ptr& link : identity.chain) {
    if (SSL_add1_chain_cert(ssl, link.get()) != 1) return false;
  }
  return true;
}

}  // namespace trireme::kube
