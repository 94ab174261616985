// The fuzz target's function over deterministic mutations of the examples, so that every build runs a little of it.
#include <gtest/gtest.h>

#include <random>

#include "base/text.h"
#include "tests/fuzz/manifest.cpp"
#include "tests/unit/api/helpers.h"

namespace trireme {
namespace {

TEST(Hostile, MutatedManifestsNeverCrash) {
  std::vector<std::string> seeds;
  for (const char* name : {"quickstart.rljob.yaml", "eight-nodes-tp4-pp4.rljob.yaml", "ppo-critic.rljob.yaml"}) {
    seeds.push_back(test::read_example(name));
  }
  seeds.push_back(to_json(parse_rljob(seeds[1], "f")).dump());
  const std::vector<std::string> tokens = {"[",
                                           "]",
                                           "{",
                                           "}",
                                           ": ",
                                           "- ",
                                           "&a ",
                                           "*a",
                                           "!!str ",
                                           "\"",
                                           "'",
                                           "|\n",
                                           ">-\n",
                                           "---\n",
                                           "...\n",
                                           "? ",
                                           "#",
                                           "\t",
                                           "%TAG ! x\n",
                                           "9223372036854775808",
                                           "-1",
                                           "0x",
                                           "1e999",
                                           "~",
                                           "null",
                                           "\xc3",
                                           "\\ud800",
                                           "<<: *a\n",
                                           std::string(1, '\0'),
                                           std::string(300, '[')};
  std::mt19937_64 random(7);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % std::max<size_t>(n, 1)); };
  for (int i = 0; i < 1500; ++i) {
    std::string text = seeds[below(seeds.size())];
    for (size_t edits = 1 + below(6); edits > 0 && !text.empty(); --edits) {
      const size_t at = below(text.size());
      switch (below(5)) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.erase(at, 1 + below(40));
          break;
        case 2:
          text.insert(at, tokens[below(tokens.size())]);
          break;
        case 3:
          text.insert(below(text.size()), text.substr(at, below(80)));
          break;
        default:
          text.resize(at);
          break;
      }
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  }
}

}  // namespace
}  // namespace trireme
