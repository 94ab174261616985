#include "trainer/data/row.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "base/error.h"
#include "trainer/data/permutation.h"
#include "trainer/data/row_file.h"

namespace trireme {
namespace {

using nlohmann::ordered_json;
using testing::ElementsAre;
using testing::HasSubstr;

std::string reason(std::string_view line, const RowSchema& schema) {
  try {
    parse_row(parse_json_object(line), schema);
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(Row, ReasonsOfBadLines) {
  const RowSchema schema{"input", "output"};
  EXPECT_THAT(reason("{\"input\": \"a\", \"output\"", schema), HasSubstr("not valid JSON at byte"));
  EXPECT_THAT(reason("{\"input\": \"\xFF\"}", schema), HasSubstr("not valid JSON at byte 12"));
  EXPECT_THAT(reason("[1, 2]", schema), HasSubstr("a JSON object is expected, found array"));
  EXPECT_THAT(reason("{\"inputs\": \"a\", \"output\": \"b\"}", schema),
              HasSubstr("no key \"input\"; did you mean \"inputs\"?"));
  EXPECT_THAT(reason("{\"text\": \"a\"}", schema), HasSubstr("no key \"input\"; it has text"));
  EXPECT_THAT(reason("{\"input\": 3, \"output\": \"b\"}", schema),
              HasSubstr("\"input\" is of type number, text or a list of messages is expected"));
  EXPECT_THAT(reason("{\"input\": \" \", \"output\": \"b\"}", schema), HasSubstr("\"input\" is empty"));
  EXPECT_THAT(reason("{\"input\": \"a\", \"output\": [1]}", schema),
              HasSubstr("\"output\" is of type array, text is expected"));
  EXPECT_THAT(reason("{\"input\": \"a\", \"output\": null}", schema), HasSubstr("\"output\" is null"));
  EXPECT_THAT(reason(std::string(200, '[') + std::string(200, ']'), schema),
              HasSubstr("nested deeper than 100 levels"));
  EXPECT_THAT(reason("{\"input\": \"a\", \"output\": 1e999}", schema), HasSubstr("not valid JSON"));
  EXPECT_LT(reason("{\"input\": \"" + std::string(100000, 'x'), schema).size(), 400u);
}

TEST(Row, ReasonsOfBadConversations) {
  const RowSchema schema{"messages", ""};
  EXPECT_THAT(reason(R"({"messages": []})", schema), HasSubstr("empty list"));
  EXPECT_THAT(reason(R"({"messages": ["hi"]})", schema), HasSubstr("\"messages\"[0] is not a message object"));
  EXPECT_THAT(reason(R"({"messages": [{"content": "x"}]})", schema), HasSubstr("no text \"role\""));
  EXPECT_THAT(reason(R"({"messages": [{"role": "user"}]})", schema), HasSubstr("no \"content\""));
  EXPECT_THAT(reason(R"({"messages": [{"role": "user", "content": 3}]})", schema),
              HasSubstr("neither text nor a list"));
  EXPECT_THAT(reason(R"({"messages": [{"role": "assistant", "content": "x"}]})", schema),
              HasSubstr("a response but no prompt"));
  EXPECT_THAT(reason(R"({"messages": [{"role": "user", "content": "x"}]})", RowSchema{"messages", "", true}),
              HasSubstr("does not end with an assistant message"));
}

TEST(Row, Layouts) {
  const auto detect = [](const char* line) {
    const RowSchema schema = detect_schema(parse_json_object(line), "", "");
    return schema.input_key + "/" + schema.output_key;
  };
  EXPECT_EQ(detect(R"({"question": "q", "answer": "a"})"), "question/answer");
  EXPECT_EQ(detect(R"({"answer": "a", "problem": "q", "solution": "s"})"), "problem/answer");
  EXPECT_EQ(detect(R"({"input": "q", "output": "a"})"), "input/output");
  EXPECT_EQ(detect(R"({"messages": [], "answer": "a"})"), "messages/");
  EXPECT_THROW(detect(R"({"text": "q"})"), Error);
  EXPECT_EQ(detect_schema(parse_json_object(R"({"messages": [], "label": "a"})"), "", "label").output_key, "label");
  EXPECT_EQ(detect_schema(parse_json_object("{}"), "in", "").output_key, "");
  // The configuration's default names give way to a known layout, other names do not.
  EXPECT_EQ(detect_schema(parse_json_object(R"({"question": "q", "answer": "a"})"), "input", "output").output_key,
            "answer");
  EXPECT_EQ(detect_schema(parse_json_object(R"({"messages": []})"), "input", "output").input_key, "messages");
  EXPECT_EQ(detect_schema(parse_json_object(R"({"messages": []})"), "prompt", "output").input_key, "prompt");
  EXPECT_THAT(reason(R"({"inputs": "q"})", detect_schema(parse_json_object(R"({"inputs": "q"})"), "input", "output")),
              HasSubstr("did you mean \"inputs\"?"));
}

TEST(Row, GoldAnswers) {
  EXPECT_EQ(gold_of("5 + 13 = <<5+13=18>>18\n#### 18"), "18");
  EXPECT_EQ(gold_of("so\n####  1,234 \n"), "1,234");
  EXPECT_EQ(gold_of("#### 7"), "7");
  EXPECT_EQ(gold_of("#### Heading\nthe text"), "#### Heading\nthe text");
  EXPECT_EQ(gold_of(" \\frac{1}{2} "), "\\frac{1}{2}");
  EXPECT_EQ(gold_of(""), "");
  const auto gold = [](const char* output) {
    return parse_row(parse_json_object(std::string(R"({"i": "x", "o": )") + output + "}"), {"i", "o"}).gold;
  };
  EXPECT_EQ(gold("18"), "18");
  EXPECT_EQ(gold("0.5"), "0.5");
  EXPECT_EQ(gold("true"), "true");
}

TEST(Row, ConversationAndExtra) {
  const Row row =
      parse_row(parse_json_object(R"({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},
      {"role": "assistant", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]}], )"
                                  R"("level": 3, "tools": [{"z": 1, "a": 2}]})"),
                {"messages", ""});
  EXPECT_EQ(row.messages.size(), 2u);
  EXPECT_EQ(row.output, "abc");
  EXPECT_EQ(row.gold, "abc");
  EXPECT_EQ(row.extra["level"], 3);
  EXPECT_FALSE(row.extra.contains("messages"));
  EXPECT_EQ(row.tools.dump(), R"([{"z":1,"a":2}])");
  const Row labelled = parse_row(
      parse_json_object(R"({"messages": [{"role": "user", "content": "q"}], "answer": "7"})"), {"messages", "answer"});
  EXPECT_EQ(labelled.gold, "7");
}

TEST(Row, PathsLeadIntoColumns) {
  const std::string line =
      R"({"context": "c", "question": "q", "answers": {"text": ["a", "b"], "at": []}, "x.y": "z"})";
  const Row row = parse_row(parse_json_object(line), {"question", "answers.text[1]", false, "context"});
  EXPECT_EQ(row.problem, "q");
  EXPECT_EQ(row.gold, "b");
  EXPECT_EQ(row.system, "c");
  EXPECT_EQ(row.extra["answers"]["text"][0], "a");
  EXPECT_EQ(parse_row(parse_json_object(line), {"x.y", "question"}).problem, "z");  // a name goes before a path
  const Row nested = parse_row(parse_json_object(R"({"prompt": [[{"content": "p"}]], "r": {"gold": 34}})"),
                               {"prompt[0][0].content", "r.gold"});
  EXPECT_EQ(nested.problem, "p");
  EXPECT_EQ(nested.gold, "34");
  EXPECT_EQ(nested.system, "");
  const auto output = [&](const char* key) { return reason(line, {"question", key}); };
  EXPECT_EQ(output("answers.text[2]"), "\"answers.text\" has no element 2 (for \"answers.text[2]\")");
  EXPECT_EQ(output("answers.at[0]"), "\"answers.at\" has no element 0 (for \"answers.at[0]\")");
  EXPECT_EQ(output("answers.texts[0]"), "\"answers\" has no \"texts\" (for \"answers.texts[0]\")");
  EXPECT_EQ(output("question.text"), "\"question\" has no \"text\" (for \"question.text\")");
  EXPECT_EQ(output("question[0]"), "\"question\" has no element 0 (for \"question[0]\")");
  for (const char* wrong : {"answers.text[]", "answers.text[", "answers.text[-1]", "answers.text[x]", "answers.text[0"})
    EXPECT_THAT(output(wrong), HasSubstr("is no path: an element of a list is NAME[0]")) << wrong;
  EXPECT_THAT(output("answer.text[0]"), HasSubstr("no key \"answer.text[0]\""));
  EXPECT_THAT(output("answers.text"), HasSubstr("\"answers.text\" is of type array, text is expected"));
  EXPECT_THAT(reason(line, {"question", "context", false, "answers"}), HasSubstr("\"answers\" is of type object"));
}

TEST(Prompt, Template) {
  EXPECT_EQ(parse_prompt_template("Solve.\n{}\nAnswer in \\boxed{{}}.", "f"),
            (std::pair<std::string, std::string>("Solve.\n", "\nAnswer in \\boxed{}.")));
  EXPECT_EQ(parse_prompt_template("{0}", "f"), (std::pair<std::string, std::string>("", "")));
  const auto error = [](const char* text) -> std::string {
    try {
      parse_prompt_template(text, "cot.txt");
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_THAT(error("no place"), HasSubstr("cot.txt has no {}"));
  EXPECT_THAT(error("{} and \\boxed{}"), HasSubstr("more than one {}"));
  EXPECT_THAT(error("x\n{problem}"), HasSubstr("cot.txt line 2: a single {"));
  EXPECT_THAT(error("{} }"), HasSubstr("a single }"));
}

std::vector<std::pair<int64_t, std::string>> cut(const std::string& text, size_t chunk, size_t limit = kMaxLineBytes) {
  std::vector<std::pair<int64_t, std::string>> lines;
  LineSplitter splitter(
      [&](const LineSplitter::Line& line) {
        lines.emplace_back(line.offset, line.too_long ? "<too long>" : std::string(line.text));
      },
      limit);
  for (size_t at = 0; at < text.size(); at += chunk) splitter.feed(std::string_view(text).substr(at, chunk));
  splitter.finish();
  return lines;
}

TEST(LineSplitter, EveryChunkSizeGivesTheSameLines) {
  using Lines = std::vector<std::pair<int64_t, std::string>>;
  const std::string text = "\xEF\xBB\xBFone\r\n\ntwo two\r\n \nthree";
  const Lines expected = {{3, "one"}, {8, ""}, {9, "two two"}, {18, " "}, {20, "three"}};
  for (size_t chunk = 1; chunk <= text.size(); ++chunk) EXPECT_EQ(cut(text, chunk), expected) << chunk;
  EXPECT_EQ(cut("", 1), Lines{});
  EXPECT_EQ(cut("\n", 1), (Lines{{0, ""}}));
  EXPECT_EQ(cut("a\n", 1), (Lines{{0, "a"}}));
  const Lines limited = {{0, "ab"}, {3, "<too long>"}, {11, "c"}};
  for (size_t chunk = 1; chunk <= 12; ++chunk) EXPECT_EQ(cut("ab\nlonger!\nc", chunk, 4), limited) << chunk;
}

TEST(NthOutside, MatchesBruteForce) {
  for (const std::vector<int64_t>& skipped : {std::vector<int64_t>{}, {0}, {0, 1, 2}, {3}, {1, 2, 5, 9, 10}}) {
    int64_t expected = 0;
    for (int64_t n = 0; n < 20; ++n, ++expected) {
      while (std::find(skipped.begin(), skipped.end(), expected) != skipped.end()) ++expected;
      EXPECT_EQ(nth_outside(skipped, n), expected);
    }
  }
}

TEST(Permutation, IsABijectionOfEverySize) {
  for (int64_t size = 0; size <= 300; ++size) {
    for (const uint64_t key : {0ULL, 1ULL, 0xdeadbeefULL}) {
      const Permutation permutation(size, key);
      std::set<int64_t> seen;
      for (int64_t i = 0; i < size; ++i) seen.insert(permutation(i));
      ASSERT_EQ(static_cast<int64_t>(seen.size()), size);
      if (size > 0) {
        EXPECT_EQ(*seen.begin(), 0);
        EXPECT_EQ(*seen.rbegin(), size - 1);
      }
    }
  }
}

TEST(Permutation, IsStableAndMixed) {
  const Permutation permutation(1000, Permutation::key(42, 0));
  // Pinned: a change would make old checkpoints continue with other prompts.
  EXPECT_THAT((std::vector<int64_t>{permutation(0), permutation(1), permutation(2), permutation(999)}),
              ElementsAre(417, 594, 218, 301));
  // A random order has about one fixed point and a mean displacement of a third of its size.
  int fixed = 0;
  double distance = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    fixed += permutation(i) == i;
    distance += std::abs(static_cast<double>(permutation(i) - i)) / 1000;
  }
  EXPECT_LT(fixed, 8);
  EXPECT_NEAR(distance, 1000.0 / 3, 30);
  const Permutation next(1000, Permutation::key(42, 1));
  int same = 0;
  for (int64_t i = 0; i < 1000; ++i) same += permutation(i) == next(i);
  EXPECT_LT(same, 10);
}

}  // namespace
}  // namespace trireme
