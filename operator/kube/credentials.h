// Credentials: the token and TLS material of a ClientConfig, read again when their files change. Internal to the
// client.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "base/clock.h"
#include "operator/kube/client_config.h"
#include "operator/kube/tls.h"

namespace trireme::kube {

// Immutable; connections made with an older generation are not used again.
struct TlsMaterial {
  uint64_t generation = 0;
  StorePtr store;                            // what the server's certificate must lead to
  std::shared_ptr<const Identity> identity;  // client certificate; null: none
};

class Credentials final {
 public:
  // Reads everything once. Throws Error(kUser | kData | kNotFound) naming the file or field.
  Credentials(const ClientConfig& config, Milliseconds refresh);

  std::string token();  // "" none
  std::shared_ptr<const TlsMaterial> tls();
  // Looks at the files now (a refused token or certificate); true when something changed.
  bool refresh_now();

 private:
  struct Texts {
    std::string ca;
    std::string cert;
    std::string key;
    friend bool operator==(const Texts& a, const Texts& b) {
      return a.ca == b.ca && a.cert == b.cert && a.key == b.key;
    }
  };
  Texts read_texts() const;
  std::string read_token() const;
  std::shared_ptr<const TlsMaterial> build(const Texts& texts, uint64_t generation) const;
  bool refresh_locked();

  const ClientConfig& config_;
  const Milliseconds refresh_;
  std::mutex mutex_;
  SteadyClock::time_point checked_;
  Texts texts_;
  std::string token_;
  std::shared_ptr<const TlsMaterial> tls_;
};

}  // namespace trireme::kube
