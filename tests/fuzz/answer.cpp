// libFuzzer: extraction and equivalence of final answers on any bytes. A newline parts gold from final answer.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "trainer/rewards/math.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t cut = text.find('\n');
  const std::string_view gold = text.substr(0, cut),
                         final_answer = cut == std::string_view::npos ? text : text.substr(cut + 1);
  (void)trireme::math_equal(gold, final_answer);
  for (const auto& found : trireme::extract_final_answers(text)) (void)trireme::math_equal(gold, found);
  return 0;
}
