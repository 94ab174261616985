// Any bytes as a kubeconfig: an Error or a configuration that is whole, never anything else.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "operator/kube/client_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace trireme::kube;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const ClientConfig config = parse_kubeconfig(text, "/dir");
    if (config.host.empty() || config.port < 1 || config.port > 65535) std::abort();
    if (config.scheme == "https" && config.ca_pem.empty() && config.ca_file.empty()) std::abort();
    if ((config.client_cert_pem.empty() && config.client_cert_file.empty()) !=
        (config.client_key_pem.empty() && config.client_key_file.empty()))
      std::abort();
  } catch (const trireme::Error&) {
  }
  try {
    ClientConfig config;
    set_server_url(config, text);
    ClientConfig again;
    set_server_url(again, config.url());
    if (again.host != config.host || again.port != config.port) std::abort();
  } catch (const trireme::Error&) {
  }
  const auto bytes = base64_decode(text);
  if (bytes && base64_decode(base64_encode(*bytes)) != bytes) std::abort();
  return 0;
}
