// `trireme plan` in this process.
#pragma once

#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "trainer/cli/commands.h"

namespace trireme::test {

// What is written to std::cout while it lives.
class Printed final {
 public:
  Printed() : before_(std::cout.rdbuf(text_.rdbuf())) {}
  ~Printed() { std::cout.rdbuf(before_); }
  Printed(const Printed&) = delete;
  Printed& operator=(const Printed&) = delete;
  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
  std::streambuf* before_;
};

// What the command with these arguments prints. Throws what it throws.
inline std::string plan(const std::vector<std::string>& arguments) {
  CLI::App app;
  CommandContext context;
  add_plan_commands(app, context);
  std::vector<std::string> words(arguments.rbegin(), arguments.rend());  // CLI11 takes them from the end
  words.emplace_back("plan");
  app.parse(words);
  const Printed printed;
  context.run();
  return printed.text();
}

}  // namespace trireme::test
