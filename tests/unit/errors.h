// The message of an error that must come, for the tests of every area.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "base/error.h"

namespace trireme::test {

// Of the Error that `call` throws; "" when it throws none.
template <class F>
std::string error_of(F&& call) {
  try {
    std::forward<F>(call)();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// The same, of a user's mistake: an Error of another kind fails the test.
template <class F>
std::string user_error_of(F&& call) {
  try {
    std::forward<F>(call)();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser) << error.what();
    return error.what();
  }
  return "";
}

inline testing::AssertionResult mentions(const char*, const char*, const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << part << "\" is not in \"" << text << "\"";
}

}  // namespace trireme::test

#define EXPECT_MENTIONS(text, part) EXPECT_PRED_FORMAT2(::trireme::test::mentions, text, part)
