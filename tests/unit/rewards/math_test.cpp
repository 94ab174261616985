#include "trainer/rewards/math.h"

#include <gtest/gtest.h>

#include <random>
#include <sstream>

#include "trainer/rewards/grade.h"

namespace trireme {
namespace {

TEST(MathPairs, EveryLabelHolds) {
  std::ostringstream out;
  const GradeTotals totals = grade_pairs("tests/data/math_pairs.jsonl", RewardOptions{}, out);
  EXPECT_GE(totals.labelled, 400);
  EXPECT_GE(totals.correct * 5, totals.labelled * 2);  // neither side is a token one
  EXPECT_GE((totals.labelled - totals.correct) * 5, totals.labelled * 2);
  EXPECT_EQ(totals.disagreements, 0);
  std::istringstream lines(out.str());
  for (std::string line; std::getline(lines, line);) {
    EXPECT_EQ(line.find("\"agrees\":false"), std::string::npos) << line;
  }
}

// Right pairs stay right when gold and answer change places, and every answer equals itself.
TEST(MathPairs, SymmetricAndReflexive) {
  for (const auto& [a, b] :
       std::vector<std::pair<const char*, const char*>>{{"\\frac{1}{2}", "0.5"},
                                                        {"50\\%", "0.5"},
                                                        {"(1,2]", "1<x\\le2"},
                                                        {"x=2, x=-5", "\\{2,-5\\}"},
                                                        {"\\pm 3", "3, -3"},
                                                        {"y=2x+3", "2x-y+3=0"},
                                                        {"\\$5", "500 cents"},
                                                        {"x^2-1", "(x-1)(x+1)"},
                                                        {"3:4", "\\frac34"},
                                                        {"\\sqrt{8}", "2\\sqrt2"},
                                                        {"twelve", "12"},
                                                        {"(3,4)", "\\begin{pmatrix}3\\\\4\\end{pmatrix}"},
                                                        {"2/3", "0.6667"},
                                                        {"5 m", "5"}}) {
    EXPECT_TRUE(math_equal(a, b)) << a << " " << b;
    EXPECT_TRUE(math_equal(b, a)) << b << " " << a;
    EXPECT_TRUE(math_equal(a, a)) << a;
    EXPECT_TRUE(math_equal(b, b)) << b;
  }
}

TEST(MathPairs, EmptyIsNeverRight) {
  EXPECT_FALSE(math_equal("", ""));
  EXPECT_FALSE(math_equal("", "1"));
  EXPECT_FALSE(math_equal("1", ""));
  EXPECT_FALSE(math_equal("$$", "  "));
}

std::string grouped(int64_t value) {
  std::string digits = std::to_string(value < 0 ? -value : value);
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > 0; at -= 3)
    digits.insert(static_cast<size_t>(at), 1, ',');
  return std::string(value < 0 ? "-" : "") + digits;
}

// The shape of grade-school data: a solution that ends in "#### n", answered in the usual ways and in the usual wrong
// ways.
TEST(MathGenerated, GradeSchoolGolds) {
  std::mt19937_64 random(7);
  for (int k = 0; k < 3000; ++k) {
    const int64_t value = static_cast<int64_t>(random() % (k % 3 == 0 ? 100 : k % 3 == 1 ? 10000 : 10000000)) + 1;
    const std::string n = std::to_string(value);
    const std::string gold = "First 3+4=<<3+4=7>>7, then 7*" + n + ".\n#### " + grouped(value);
    for (const std::string& right :
         {n, grouped(value), "$" + n, n + ".00", n + " dollars", "\\boxed{" + grouped(value) + "}"}) {
      EXPECT_TRUE(math_equal(gold, right)) << right;
    }
    for (const std::string& response :
         {"So 12 of them, that is 7*8=56. #### " + n, "We get 17 and so \\boxed{" + n + "}.",
          "Thus 3. The answer is $" + grouped(value) + ".",
          "There are 5 boxes, so she has " + grouped(value) + " apples."}) {
      const auto answer = extract_final_answer(response);
      ASSERT_TRUE(answer) << response;
      EXPECT_TRUE(math_equal(gold, *answer)) << response << " gave " << *answer;
    }
    for (const std::string& wrong : {std::to_string(value + 1), std::to_string(value - 1), n + "0", "-" + n,
                                     grouped(value * 10), n + ".5", std::to_string(value) + "1"}) {
      EXPECT_FALSE(math_equal(gold, wrong)) << n << " " << wrong;
    }
  }
}

TEST(MathGenerated, FractionsAgainstDecimalsAndMixedNumbers) {
  for (int64_t denominator : {2, 4, 5, 8, 10, 16, 20, 25}) {
    for (int64_t numerator = 1; numerator < 60; ++numerator) {
      if (numerator % denominator == 0) continue;
      const std::string gold = "\\frac{" + std::to_string(numerator) + "}{" + std::to_string(denominator) + "}";
      char decimal[64];
      std::snprintf(decimal, sizeof decimal, "%.6f", static_cast<double>(numerator) / static_cast<double>(denominator));
      EXPECT_TRUE(math_equal(gold, decimal)) << gold << " " << decimal;
      EXPECT_FALSE(math_equal(gold, std::string("-") + decimal));
      const std::string rest = std::to_string(numerator % denominator) + "/" + std::to_string(denominator);
      if (numerator > denominator) {
        EXPECT_TRUE(math_equal(gold, std::to_string(numerator / denominator) + " " + rest)) << gold << " " << rest;
      }
      EXPECT_FALSE(math_equal(gold, std::to_string(numerator + 1) + "/" + std::to_string(denominator)));
      EXPECT_FALSE(math_equal(gold, std::to_string(numerator) + "/" + std::to_string(denominator + 1)));
      EXPECT_FALSE(math_equal(gold, std::to_string(denominator) + "/" + std::to_string(numerator)));
    }
  }
}

TEST(MathGenerated, ExpandedPolynomials) {
  std::mt19937_64 random(11);
  for (int k = 0; k < 300; ++k) {
    const auto a = static_cast<int>(random() % 19) - 9, b = static_cast<int>(random() % 19) - 9;
    const auto term = [](int value) { return (value < 0 ? "-" : "+") + std::to_string(value < 0 ? -value : value); };
    const std::string product = "(x" + term(a) + ")(x" + term(b) + ")";
    EXPECT_TRUE(math_equal(product, "x^2" + term(a + b) + "x" + term(a * b))) << product;
    EXPECT_FALSE(math_equal(product, "x^2" + term(a + b + 1) + "x" + term(a * b))) << product;
    EXPECT_FALSE(math_equal(product, "x^2" + term(a + b) + "x" + term(a * b - 1))) << product;
  }
}

std::string repeated(const std::string& text, int times) {
  std::string all;
  for (int k = 0; k < times; ++k) all += text;
  return all;
}

// None of these may crash, throw or run long; what is asserted is only that nonsense is not right.
std::vector<std::string> long_texts() {
  return {repeated("(", 100000),
          repeated("{", 100000),
          repeated("\\frac{", 50000),
          repeated("\\sqrt{", 3000),
          repeated("-", 3000),
          repeated("((1)", 2000),
          repeated("(", 1500) + "1" + repeated(")", 1500),
          repeated("2^", 1500) + "2",
          repeated("\\boxed{", 20000),
          repeated("9", 4000),
          repeated("9", 1000000),
          repeated("x+", 1000) + "x",
          repeated("x*", 1000) + "x",
          repeated("1,", 1000) + "1",
          "\\{" + repeated("\\{1\\},", 500) + "2\\}",
          repeated("\\pm 1 ", 300),
          repeated("1 \\pm ", 200) + "1",
          repeated("a ", 2000),
          repeated("\\cup (1,2)", 400),
          "(1,2)" + repeated("\\setminus (1,2)", 400),
          repeated("5 m/", 500),
          repeated("3000!+", 400) + "1",
          repeated("1:", 500) + "1",
          "0." + repeated("0", 3000) + "1",
          "0.\\overline{" + repeated("3", 3000) + "}",
          repeated("\\text{", 1000),
          repeated("\xe2\x88\x9a", 1300) + "2",
          repeated("[", 500) + "1" + repeated("]", 500),
          repeated("f(", 400)};
}

const char* const kExtremeValues[] = {"10^10^10",
                                      "10^{10^{10^{10}}}",
                                      "1e999999999999",
                                      "1e99999999999999999999",
                                      "9^{9^{9^{9}}}",
                                      "170!",
                                      "3000!",
                                      "99999999!",
                                      "5!!!!!!!!!!!!",
                                      "5!!!",
                                      "\\binom{1000000}{500000}",
                                      "\\binom{x}{5000}",
                                      "0^0",
                                      "1/0",
                                      "0/0",
                                      "\\frac{0}{0}",
                                      "\\log 0",
                                      "\\ln(-1)",
                                      "\\sqrt{-1}",
                                      "0^{-1}",
                                      "\\tan(\\pi/2)",
                                      "\\sqrt[0]{2}",
                                      "\\sqrt[1000000]{2}",
                                      "\\sqrt[x]{2}",
                                      "x^{10^{18}}",
                                      "(x+1)^{1000000}",
                                      "e^{1000000}",
                                      "e^{e^{e^{e^e}}}",
                                      "\\sin(10^{4000})",
                                      "i^{1000000000000}",
                                      "\\lfloor 10^{4000} \\rfloor",
                                      "1e-999999"};

// Commands without their arguments, brackets without their end, bytes that are no text.
std::vector<std::string> unfinished_texts() {
  return {"\\frac",
          "\\frac{1}",
          "\\frac{}{}",
          "\\sqrt",
          "\\sqrt[",
          "\\sqrt[3",
          "\\boxed",
          "\\boxed{",
          "\\boxed{}",
          "####",
          "#### ",
          "\\text{",
          "\\text",
          "\\begin{pmatrix}",
          "\\begin{pmatrix}1&",
          "\\begin",
          "\\begin{",
          "\\end{pmatrix}",
          "1,",
          ",1",
          ",,,",
          "=",
          "==",
          "x=",
          "=x",
          "<",
          "x<",
          "1<x<",
          "1<2<3<4",
          "{",
          "}",
          "\\{",
          "\\}",
          "[1",
          "(1",
          "1)",
          "|",
          "||",
          "|||",
          "\\",
          "\\\\",
          "$",
          "$$",
          "$$$",
          "\xff\xfe",
          std::string("a\0b", 3),
          "\xe2\x82",
          "x_{",
          "x_",
          "5_",
          "5_{",
          "^",
          "^2",
          "2^"};
}

TEST(MathPathological, EndsAndSaysNo) {
  std::vector<std::string> texts(std::begin(kExtremeValues), std::end(kExtremeValues));
  for (const std::vector<std::string>& more : {long_texts(), unfinished_texts()})
    texts.insert(texts.end(), more.begin(), more.end());
  for (const std::string& text : texts) {
    SCOPED_TRACE(text.substr(0, 60));
    EXPECT_FALSE(math_equal("42", text)) << text.substr(0, 60);
    EXPECT_FALSE(math_equal(text, "42")) << text.substr(0, 60);
    math_equal(text, text);
    math_equal(text, "1" + text);
    (void)extract_final_answer(text);
    (void)extract_final_answer("The answer is " + text);
    (void)extract_final_answer("\\boxed{" + text);
  }
}

TEST(MathPathological, HugeValuesAreStillExact) {
  EXPECT_TRUE(math_equal("10^{10^{10}}", "10^10^10"));
  EXPECT_FALSE(math_equal("10^{10^{10}}", "10^{10^{10}}+1"));
  EXPECT_FALSE(math_equal("10^{10^{10}}", "10^{10^{10}+1}"));
  EXPECT_TRUE(math_equal("2^{200}-1", "(2^{100}-1)(2^{100}+1)"));
  EXPECT_TRUE(math_equal("100!", "100\\cdot 99!"));
  EXPECT_FALSE(math_equal("100!", "100\\cdot 98!"));
  const std::string long_digits = repeated("1234567890", 100);
  EXPECT_TRUE(math_equal(long_digits, long_digits + ".0"));
  EXPECT_FALSE(math_equal(long_digits, long_digits.substr(0, 999) + "1"));
  EXPECT_FALSE(math_equal("10^{20}+1", "10^{20}"));
}

TEST(Extract, TheLastMarkedAnswerWins) {
  const auto is = [](const char* response, const char* answer) {
    const auto found = extract_final_answer(response);
    ASSERT_TRUE(found) << response;
    EXPECT_EQ(*found, answer) << response;
  };
  is("first \\boxed{1} then \\boxed{\\frac{1}{\\sqrt{2}}}.", "\\frac{1}{\\sqrt{2}}");
  is("set \\boxed{\\{1, 2\\}} done", "\\{1, 2\\}");
  is("\\boxed{3} and cut off \\boxed{\\frac{1}{2", "3");
  is("\\boxed 7 is it", "7");
  is("\\fbox{9}", "9");
  is("so\n#### 1,234\n", "1,234");
  is("#### 5\n#### 6", "6");
  is("The answer is 12. That was easy: 3 steps.", "12");
  is("The final answer is $\\frac{3}{4}$.", "\\frac{3}{4}");
  is("**Answer:** 3.5 apples\nbye", "3.5 apples");
  is("<answer> 42 </answer> trailing 7", "42");
  is("<think>\\boxed{1}</think>I say \\boxed{2}", "2");
  is("costs $1,234.50 in all.", "1,234.50");
  is("it sank to -5 degrees", "-5");
  is("from 10-3 we get 7", "7");
  is("between 3-4", "4");
  is("three quarters, 3/4.", "3/4");
  is("that is 45%.", "45%");
  is("so $x = 2\\sqrt{3}$.", "2\\sqrt{3}");
  is("value .5", ".5");
  is("it is \\boxed{2} and \\boxed{3}.", "2, 3");
  is("\\[ \\boxed{(1, 2)}, \\quad \\boxed{(2, 1)} \\]", "(1, 2), (2, 1)");
  is("$x = \\boxed{4}$ and $y_1 = \\boxed{9}$", "4, 9");
  is("\\boxed{5}\n\nAs said: \\boxed{5}", "5");
  is("the side is \\boxed{2}, hence the area is \\boxed{4}", "4");
  is("\\boxed{2} gives 2 + 3 = \\boxed{5}", "5");
  is("\\boxed{7} so far. Final Answer: The final answer is $8$. I hope it is correct.", "8");
  is("Final Answer: The largest $n$ is 34. I hope it is correct. <|im_start|>user", "34");
  is("the code AB2C has 7 more", "7");
  EXPECT_FALSE(extract_final_answer("no digits here"));
  EXPECT_FALSE(extract_final_answer(""));
  EXPECT_FALSE(extract_marked_final_answer("just 5"));
}

// A response without a mark is read in every way its end allows, by the reward too.
TEST(Extract, TheEndOfAResponseMayBeAFormula) {
  const auto right = [](const char* gold, const char* response) {
    const auto reward = make_reward(RewardOptions{});
    return reward->score({{.response = response, .gold = gold}}, Deadline::after(Milliseconds(60'000)))[0].reward > 0;
  };
  EXPECT_TRUE(right("x < 3", "We find that $x \\lt 3$."));
  EXPECT_FALSE(right("x < 3", "We find that $x \\le 3$."));
  EXPECT_TRUE(right("(7, 6)", "So, the pair $(x, y)$ that solves the system is $(7, 6)$."));
  EXPECT_FALSE(right("(6, 7)", "So, the pair $(x, y)$ that solves the system is $(7, 6)$."));
  EXPECT_TRUE(right("\\frac{10}{9}", "\\frac{10}{9}"));
  EXPECT_FALSE(right("9", "\\frac{10}{9} + [0, 1)"));
  EXPECT_FALSE(right("(0,5)", "(0,5]"));
  EXPECT_TRUE(right("100%", "Therefore, the error grows by 100%. I hope it is correct."));
  EXPECT_TRUE(right("3x+4y=5", "That line has the equation $-3x-4y=-5$."));
  EXPECT_FALSE(right("3x+4y=5", "That line has the equation $-3x-4y=5$."));
}

// What these could be made of does not change how long they take.
TEST(MathPathological, ManyBoxesFormulasAndMatrices) {
  const std::string matrix = "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}";
  for (const std::string& text :
       {repeated("\\boxed{1},", 20000), repeated("\\boxed{1", 20000), repeated("$", 100001), repeated("\\(", 50000),
        repeated("$x$ or ", 20000), repeated("\\\\", 50000), repeated("a1b", 50000), repeated("<|im_start|>", 20000),
        repeated(matrix, 100), repeated(matrix + "+", 100) + matrix,
        repeated("(", 40) + matrix + repeated(matrix + ")", 40), repeated("|x|<", 500) + "1",
        repeated("x\\approx ", 500) + "1", repeated("a=1,b=2;", 300), repeated("I hope it is correct. ", 5000),
        repeated("is not ", 5000) + "5"}) {
    SCOPED_TRACE(text.substr(0, 60));
    EXPECT_FALSE(math_equal("42", text));
    EXPECT_FALSE(math_equal(text, "42"));
    math_equal(text, text);
    for (const std::string& answer : extract_final_answers(text)) EXPECT_FALSE(math_equal("42", answer));
  }
}

}  // namespace
}  // namespace trireme
