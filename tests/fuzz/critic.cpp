// libFuzzer: bytes as what actor and critic ranks write to each other. What is read is within its bounds, and packs to
// what reads as the same.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/error.h"
#include "trainer/algorithms/critic_wire.h"

namespace {

using namespace trireme;

void expect(bool holds) {
  if (!holds) std::abort();
}

// Bytes that are refused are refused as data.
template <typename Parse, typename Pack>
void read(std::string_view bytes, Parse&& parse, Pack&& pack) {
  std::string packed;
  try {
    packed = pack(parse(bytes));
  } catch (const Error& error) {
    expect(error.kind() == ErrorKind::kData);
    return;
  }
  expect(pack(parse(packed)) == packed);
}

// Of responses of 0, 1 and 3 tokens.
void read_values(std::string_view bytes) {
  std::vector<Sample> samples(3);
  samples[1].response = {7};
  samples[2].response = {8, 9, 10};
  try {
    unpack_values(bytes, samples);
  } catch (const Error& error) {
    expect(error.kind() == ErrorKind::kData);
    return;
  }
  expect(pack_values(samples) == bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  read(bytes, unpack_call, pack_call);
  read(bytes, unpack_for_critic, pack_for_critic);
  read(bytes, unpack_trained, pack_trained);
  read_values(bytes);
  return 0;
}
