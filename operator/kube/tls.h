// OpenSSL objects with owners, and PEM in and out. Used by the client, the server and the certificate functions.
#pragma once

#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::kube {

template <auto Free>
struct OpenSslFree {
  template <class T>
  void operator()(T* p) const {
    Free(p);
  }
};
using X509Ptr = std::unique_ptr<X509, OpenSslFree<X509_free>>;
using KeyPtr = std::unique_ptr<EVP_PKEY, OpenSslFree<EVP_PKEY_free>>;
using StorePtr = std::unique_ptr<X509_STORE, OpenSslFree<X509_STORE_free>>;
using BioPtr = std::unique_ptr<BIO, OpenSslFree<BIO_free_all>>;

// The oldest error of this thread's OpenSSL queue as text; empties the queue.
std::string openssl_error();

// All certificates of a PEM text, in order. Throws Error(kData) naming `what` when there is none or one is malformed.
std::vector<X509Ptr> parse_certificates(std::string_view pem, const std::string& what);
KeyPtr parse_private_key(std::string_view pem, const std::string& what);
StorePtr make_store(std::string_view ca_pem, const std::string& what);

// A certificate with its chain and key, ready for a handshake. Immutable, shared between threads.
struct Identity {
  X509Ptr certificate;
  KeyPtr key;
  std::vector<X509Ptr> chain;  // intermediates
};
// Throws Error(kData) when they do not parse or belong together.
std::shared_ptr<const Identity> make_identity(std::string_view cert_pem, std::string_view key_pem,
                                              const std::string& what);
// Gives it to one connection; false with an OpenSSL error in the queue.
bool use_identity(SSL* ssl, const Identity& identity);

}  // namespace trireme::kube
