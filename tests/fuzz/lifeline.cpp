// Any bytes as a line between ranks: a message within bounds, or none.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "trainer/parallel/lifeline.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace trireme;
  using Kind = LifelineMessage::Kind;
  const LifelineMessage message = parse_lifeline_message({reinterpret_cast<const char*>(data), size});
  if ((message.kind == Kind::kJoin || message.kind == Kind::kDied) && message.rank < 0) std::abort();
  if (message.text.size() > 1000) std::abort();
  if (message.kind != Kind::kDied || message.text.find('\n') != std::string::npos) return 0;
  std::string line = died_message(message.rank, message.text);
  line.pop_back();
  const LifelineMessage again = parse_lifeline_message(line);
  if (again.kind != Kind::kDied || again.rank != message.rank || again.text != message.text) std::abort();
  return 0;
}
