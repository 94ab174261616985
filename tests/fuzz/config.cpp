// Any bytes as a configuration file (with one override from its first line): an Error or a configuration that prints
// and reads back as itself, never anything else.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "trainer/config/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  std::vector<std::string> overrides;
  if (!text.empty() && text[0] == '!') overrides.push_back(text.substr(1, text.find('\n') - 1));
  if (text.find("defaults") != std::string::npos) return 0;  // would read files
  try {
    const trireme::Config config = trireme::load_config_text(
        overrides.empty() ? text : text.substr(text.find('\n') == std::string::npos ? text.size() : text.find('\n')),
        overrides);
    const std::string printed = trireme::to_yaml(config);
    if (trireme::to_yaml(trireme::load_config_text(printed)) != printed) std::abort();
  } catch (const trireme::Error& error) {
    if (error.kind() == trireme::ErrorKind::kInternal) std::abort();
  }
  return 0;
}
