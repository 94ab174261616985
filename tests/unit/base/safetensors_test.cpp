#include "base/safetensors.h"

#include <gtest/gtest.h>

#include <chrono>

#include "base/error.h"

namespace trireme {
namespace {

std::string with_header(const std::string& json, size_t data_bytes) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(json.size() >> (8 * i) & 0xff);
  return bytes + json + std::string(data_bytes, 'x');
}

std::string problem_of(const std::string& bytes) {
  try {
    parse_safetensors_header(bytes, bytes.size(), "file.safetensors");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kData);
    EXPECT_NE(std::string(error.what()).find("file.safetensors"), std::string::npos);
    return error.what();
  }
  return "";
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

TEST(SafetensorsHeader, RoundTrip) {
  const std::vector<SafetensorsEntry> entries = {
      {"b", "F32", {2, 3}, 0, 24}, {"a \"quoted\"", "BF16", {}, 24, 26}, {"none", "I64", {0}, 26, 26}};
  const std::string header = make_safetensors_header(entries, {{"format", "pt"}});
  EXPECT_EQ(header.size() % 8, 0u);
  const SafetensorsHeader parsed = parse_safetensors_header(header, header.size() + 26, "file");
  ASSERT_EQ(parsed.entries.size(), 3u);
  EXPECT_EQ(parsed.data_start, header.size());
  EXPECT_EQ(parsed.metadata.at("format"), "pt");
  EXPECT_EQ(parsed.entries[0].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(parsed.entries[1].name, "a \"quoted\"");
}

TEST(SafetensorsHeader, AcceptsAnEmptyFileOfNoTensors) { EXPECT_EQ(problem_of(with_header("{}", 0)), ""); }

// What looks through all tensors at the end of each takes minutes here.
TEST(SafetensorsHeader, ManyTensorsTakeLinearTime) {
  std::string json = "{" + entry("t", "U8", "[0]", "[0,0]");
  for (int i = 0; i < 100000; ++i) json += "," + entry("t" + std::to_string(i), "U8", "[0]", "[0,0]");
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(problem_of(with_header(json + "}", 0)), "");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

TEST(SafetensorsHeader, EveryRuleIsChecked) {
  const auto expect = [](const std::string& json, size_t data, const std::string& part) {
    const std::string problem = problem_of(with_header(json, data));
    EXPECT_NE(problem.find(part), std::string::npos) << problem;
  };
  EXPECT_NE(problem_of("abc").find("truncated"), std::string::npos);
  EXPECT_NE(problem_of(std::string(8, '\xff')).find("header length"), std::string::npos);
  EXPECT_NE(problem_of(with_header("{}", 0).substr(0, 9)).find("truncated"), std::string::npos);
  expect("[]", 0, "not a JSON object");
  expect("{\"a\":", 0, "not a JSON object");
  expect("{" + entry("a", "F32", "[1]", "[0,4]") + "," + entry("b", "F32", "[1]", "[2,6]") + "}", 6,
         "tensor b overlaps");
  expect("{" + entry("a", "F32", "[1]", "[0,4]") + "," + entry("b", "F32", "[1]", "[6,10]") + "}", 10,
         "gap before tensor b");
  expect("{" + entry("a", "F32", "[1]", "[0,4]") + "}", 3, "truncated: tensor a");
  expect("{" + entry("a", "F32", "[1]", "[0,4]") + "}", 5, "belong to none");
  expect("{" + entry("a", "F32", "[2]", "[0,4]") + "}", 4, "need 8");
  expect("{" + entry("a", "Q4", "[1]", "[0,4]") + "}", 4, "unknown dtype Q4");
  expect("{" + entry("a", "F32", "[-1]", "[0,4]") + "}", 4, "non-negative");
  expect("{" + entry("a", "F32", "[1]", "[4,0]") + "}", 4, "before they begin");
  expect("{" + entry("a", "F32", "[1]", "[0]") + "}", 4, "not a pair");
  expect("{" + entry("a", "F32", "[4294967296,4294967296,4294967296]", "[0,4]") + "}", 4, "overflows");
  expect("{" + entry("a", "F32", "[1]", "[0,4]") + "," + entry("a", "F32", "[1]", "[4,8]") + "}", 8, "names a twice");
  expect("{\"a\":3}", 0, "lacks dtype");
  expect("{\"__metadata__\":{\"k\":1}}", 0, "__metadata__.k");
}

}  // namespace
}  // namespace trireme
