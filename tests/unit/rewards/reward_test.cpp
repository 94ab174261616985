// The rewards themselves: format, command (hanging, crashing, babbling programs) and http (errors, time-outs).
#include "trainer/rewards/reward.h"

#include <gtest/gtest.h>
#include <httplib.h>

#include <atomic>
#include <fstream>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "trainer/rewards/grade.h"

namespace trireme {
namespace {

Deadline long_deadline() { return Deadline::after(Milliseconds(120000)); }

std::vector<RewardRequest> responses(const std::vector<std::string>& texts) {
  std::vector<RewardRequest> requests;
  for (const std::string& text : texts) requests.push_back({.prompt = "p", .response = text, .gold = "7"});
  return requests;
}

std::string message_of(const RewardOptions& options) {
  try {
    make_reward(options);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser);
    return error.what();
  }
  return "";
}

TEST(Rewards, BadOptionsAreNamed) {
  EXPECT_NE(message_of({.type = "maths"}).find("did you mean math"), std::string::npos);
  EXPECT_NE(message_of({.type = "format"}).find("pattern or tags"), std::string::npos);
  EXPECT_NE(message_of({.type = "format", .pattern = "(a"}).find("(a"), std::string::npos);
  EXPECT_NE(message_of({.type = "format", .tags = {"<think>"}}).find("bare name"), std::string::npos);
  EXPECT_NE(message_of({.type = "command"}).find("command is empty"), std::string::npos);
  EXPECT_NE(message_of({.type = "http", .url = "localhost:80"}).find("url"), std::string::npos);
  EXPECT_NE(message_of({.type = "http", .url = "http://"}).find("url"), std::string::npos);
  EXPECT_NE(message_of({.timeout_s = 0}).find("timeout_s"), std::string::npos);
  EXPECT_NE(message_of({.num_workers = 0}).find("num_workers"), std::string::npos);
}

TEST(MathReward, ScoresWholeResponses) {
  const auto reward = make_reward({});
  const auto results =
      reward->score(responses({"so \\boxed{7}", "so \\boxed{8}", "it is 7", "nothing", ""}), long_deadline());
  ASSERT_EQ(results.size(), 5u);
  const double expected[] = {1, 0, 1, 0, 0};
  for (size_t k = 0; k < 5; ++k) {
    EXPECT_EQ(results[k].reward, expected[k]) << k;
    EXPECT_FALSE(results[k].failed);
  }
}

TEST(FormatReward, TagsOnceEachInOrder) {
  const auto reward = make_reward({.type = "format", .tags = {"think", "answer"}});
  const auto results =
      reward->score(responses({"<think>a\nb</think> <answer>7</answer>", "<answer>7</answer><think>a</think>",
                               "<think>a</think>", "<think>a</think><think>b</think><answer>7</answer>",
                               "<think>a<answer>7</answer></think>", "</think><think><answer></answer>"}),
                    long_deadline());
  const double expected[] = {1, 0, 0, 0, 0, 0};
  for (size_t k = 0; k < 6; ++k) EXPECT_EQ(results[k].reward, expected[k]) << k;
}

TEST(FormatReward, PatternIsLinearOnHostileText) {
  const auto reward = make_reward({.type = "format", .pattern = "^(a+)+\\\\boxed\\{.+\\}\\s*$"});
  const auto results =
      reward->score(responses({std::string(200000, 'a'), "aa\\boxed{7}\n", "aa\\boxed{}", "a\nb"}), long_deadline());
  EXPECT_EQ(results[0].reward, 0);
  EXPECT_EQ(results[1].reward, 1);
  EXPECT_EQ(results[2].reward, 0);
  EXPECT_EQ(results[3].reward, 0);
}

// Answers 0.5 to each line, but hangs, crashes or babbles when the line says so.
RewardOptions shell_reward() {
  RewardOptions options{.type = "command"};
  options.command = {
      "sh", "-c",
      "while read -r line; do case \"$line\" in *CRASH*) exit 3;; *HANG*) sleep 600; exit 0;; *GARBAGE*) echo hello;; "
      "*TWICE*) printf '%s\\n%s\\n' '{\"reward\": 2}' '{\"reward\": 2}';; "
      "*SORRY*) echo '{\"error\": \"cannot say\"}';; "
      "*NULL*) echo '{\"reward\": null}';; *) echo '{\"reward\": 0.5}';; esac; done"};
  return options;
}

TEST(CommandReward, AnswersInOrderAndKeepsTheProgram) {
  TemporaryDirectory folder;
  RewardOptions options{.type = "command"};
  options.command = {"sh", "-c",
                     "echo start >> " + (folder.path() / "starts").string() +
                         "; n=0; while read -r line; do n=$((n+1)); echo \"{\\\"reward\\\": $n}\"; done"};
  const auto reward = make_reward(options);
  for (int round = 0; round < 3; ++round) {
    const auto results = reward->score(responses({"a", "b", "c\n\"quoted\" \xff bytes"}), long_deadline());
    for (int k = 0; k < 3; ++k) EXPECT_EQ(results[static_cast<size_t>(k)].reward, round * 3 + k + 1);
  }
  EXPECT_EQ(read_file(folder.path() / "starts"), "start\n");
}

TEST(CommandReward, SeesPromptResponseGoldAndExtra) {
  RewardOptions options{.type = "command"};
  options.command = {
      "sh", "-c",
      "while read -r line; do case \"$line\" in *'\"extra\":{\"level\":3}'*) ;; *) echo no; esac; case \"$line\" in "
      "*'\"gold\":\"7\"'*) ;; *) echo no;; esac; "
      "case \"$line\" in *'\"prompt\":\"p\"'*'\"response\":\"r\"'*) echo '{\"reward\": 1}';; *) echo no;; esac; done"};
  auto requests = responses({"r"});
  requests[0].extra = {{"level", 3}};
  const auto results = make_reward(options)->score(requests, long_deadline());
  EXPECT_EQ(results[0].reward, 1) << results[0].error;
}

TEST(CommandReward, LargeBatchesDoNotDeadlock) {
  const auto results = make_reward(shell_reward())
                           ->score(responses(std::vector<std::string>(40, std::string(10000, 'x'))), long_deadline());
  ASSERT_EQ(results.size(), 40u);
  for (const auto& result : results) EXPECT_EQ(result.reward, 0.5) << result.error;
}

TEST(CommandReward, ACrashCostsOneResponse) {
  const auto results =
      make_reward(shell_reward())->score(responses({"a", "CRASH", "b", "CRASH", "c"}), long_deadline());
  ASSERT_EQ(results.size(), 5u);
  for (const size_t k : {0, 2, 4}) EXPECT_EQ(results[k].reward, 0.5) << results[k].error;
  for (const size_t k : {1, 3}) {
    EXPECT_TRUE(results[k].failed);
    EXPECT_NE(results[k].error.find("exit code 3"), std::string::npos) << results[k].error;
  }
}

TEST(CommandReward, AHangCostsOneResponseWhenEachHasALimit) {
  RewardOptions options = shell_reward();
  options.answer_timeout_s = 8;  // a shell starts in it
  const auto results = make_reward(options)->score(responses({"a", "HANG", "b"}), long_deadline());
  EXPECT_EQ(results[0].reward, 0.5) << results[0].error;
  EXPECT_TRUE(results[1].failed);
  EXPECT_NE(results[1].error.find("time limit"), std::string::npos) << results[1].error;
  EXPECT_EQ(results[2].reward, 0.5) << results[2].error;
}

TEST(CommandReward, TheGroupsDeadlineEndsIt) {
  const auto reward = make_reward(shell_reward());
  const auto results = reward->score(responses({"HANG", "a"}), Deadline::after(Milliseconds(300)));
  ASSERT_EQ(results.size(), 2u);
  EXPECT_TRUE(results[0].failed);
  EXPECT_TRUE(results[1].failed);
  EXPECT_EQ(reward->score(responses({"a"}), long_deadline())[0].reward, 0.5);  // and the next group works
}

TEST(CommandReward, GarbageAndSurplusLinesCannotShiftAnswers) {
  const auto reward = make_reward(shell_reward());
  auto results = reward->score(responses({"a", "GARBAGE", "b", "SORRY", "NULL", "c"}), long_deadline());
  EXPECT_EQ(results[0].reward, 0.5);
  EXPECT_NE(results[1].error.find("hello"), std::string::npos) << results[1].error;
  EXPECT_EQ(results[2].reward, 0.5) << results[2].error;
  EXPECT_NE(results[3].error.find("cannot say"), std::string::npos) << results[3].error;
  EXPECT_TRUE(results[4].failed);
  EXPECT_EQ(results[5].reward, 0.5) << results[5].error;
  reward->score(responses({"TWICE"}), long_deadline());  // both lines in one write
  EXPECT_EQ(reward->score(responses({"a"}), long_deadline())[0].reward, 0.5);
}

TEST(CommandReward, AProgramThatNeverWorksIsGivenUp) {
  RewardOptions options{.type = "command"};
  options.command = {"sh", "-c", "exit 1"};
  auto results = make_reward(options)->score(responses(std::vector<std::string>(50, "a")), long_deadline());
  ASSERT_EQ(results.size(), 50u);
  for (const auto& result : results) EXPECT_TRUE(result.failed);
  EXPECT_NE(results[49].error.find("gave up"), std::string::npos) << results[49].error;
  options.command = {"no-such-program-anywhere"};
  results = make_reward(options)->score(responses({"a"}), long_deadline());
  EXPECT_NE(results[0].error.find("no-such-program-anywhere"), std::string::npos);
}

TEST(CommandReward, CancelEndsAHang) {
  const auto reward = make_reward(shell_reward());
  std::thread canceller([&] {
    std::this_thread::sleep_for(Milliseconds(100));
    reward->cancel();
  });
  const auto results = reward->score(responses({"HANG", "a"}), Deadline::after(Milliseconds(3600000)));
  canceller.join();
  EXPECT_TRUE(results[0].failed && results[1].failed);
}

// A reward service on a port of the system's choosing.
class Service final {
 public:
  explicit Service(httplib::Server::Handler handler) {
    server_.Post("/score", std::move(handler));
    port_ = server_.bind_to_any_port("127.0.0.1");
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::sleep_for(Milliseconds(1));
  }
  ~Service() {
    server_.stop();
    thread_.join();
  }
  RewardOptions options() const {
    RewardOptions options{.type = "http"};
    options.url = "http://127.0.0.1:" + std::to_string(port_) + "/score";
    return options;
  }

 private:
  httplib::Server server_;
  int port_ = 0;
  std::thread thread_;
};

void answer_lengths(const httplib::Request& request, httplib::Response& response) {
  nlohmann::json rewards = nlohmann::json::array();
  const nlohmann::json parsed = nlohmann::json::parse(request.body);
  for (const auto& one : parsed["requests"]) rewards.push_back(one["response"].get<std::string>().size());
  response.set_content(nlohmann::json{{"rewards", rewards}}.dump(), "application/json");
}

TEST(HttpReward, BatchesInOrder) {
  std::atomic<int> posts{0};
  Service service([&](const httplib::Request& request, httplib::Response& response) {
    ++posts;
    answer_lengths(request, response);
  });
  RewardOptions options = service.options();
  options.max_batch = 3;
  const auto results =
      make_reward(options)->score(responses({"a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg"}), long_deadline());
  for (size_t k = 0; k < 7; ++k) EXPECT_EQ(results[k].reward, static_cast<double>(k + 1)) << results[k].error;
  EXPECT_EQ(posts, 3);
}

TEST(HttpReward, ErrorsAreTriedAgainThenFail) {
  std::atomic<int> posts{0};
  Service service([&](const httplib::Request& request, httplib::Response& response) {
    if (++posts < 3)
      response.status = posts == 1 ? 503 : 429;
    else
      answer_lengths(request, response);
  });
  EXPECT_EQ(make_reward(service.options())->score(responses({"abc"}), long_deadline())[0].reward, 3);
  EXPECT_EQ(posts, 3);

  std::atomic<int> bad{0};
  Service broken([&](const httplib::Request&, httplib::Response& response) {
    ++bad;
    response.status = 400;
  });
  const auto results = make_reward(broken.options())->score(responses({"abc"}), long_deadline());
  EXPECT_NE(results[0].error.find("status 400"), std::string::npos) << results[0].error;
  EXPECT_EQ(bad, 1);  // a request that is wrong stays wrong
}

TEST(HttpReward, WrongBodiesFailTheBatch) {
  for (const char* body : {"not json", "{}", "{\"rewards\": [1]}", "{\"rewards\": 3}", "[1, 2]"}) {
    Service service(
        [&](const httplib::Request&, httplib::Response& response) { response.set_content(body, "application/json"); });
    for (const auto& result : make_reward(service.options())->score(responses({"a", "b"}), long_deadline()))
      EXPECT_TRUE(result.failed) << body;
  }
  Service half([&](const httplib::Request&, httplib::Response& response) {
    response.set_content("{\"rewards\": [1.5, null]}", "application/json");
  });
  const auto results = make_reward(half.options())->score(responses({"a", "b"}), long_deadline());
  EXPECT_EQ(results[0].reward, 1.5);
  EXPECT_TRUE(results[1].failed);
}

TEST(HttpReward, NobodyListening) {
  RewardOptions options;
  {
    Service service(answer_lengths);
    options = service.options();
  }
  const auto results = make_reward(options)->score(responses({"a"}), long_deadline());
  EXPECT_TRUE(results[0].failed);
  EXPECT_NE(results[0].error.find(options.url), std::string::npos);
}

// The service holds on until told to go; the reward must not wait for it.
struct Holding {
  std::atomic<bool> go{false};
  std::atomic<int> posts{0};
  Service service{[this](const httplib::Request& request, httplib::Response& response) {
    ++posts;
    while (!go) std::this_thread::sleep_for(Milliseconds(5));
    answer_lengths(request, response);
  }};
  ~Holding() { go = true; }
};

TEST(HttpReward, TimesOut) {
  auto holding = std::make_unique<Holding>();
  const auto results =
      make_reward(holding->service.options())->score(responses({"a", "b"}), Deadline::after(Milliseconds(300)));
  ASSERT_EQ(results.size(), 2u);
  EXPECT_NE(results[0].error.find("time limit"), std::string::npos) << results[0].error;
  holding->go = true;
}

TEST(HttpReward, CancelEndsAWait) {
  auto holding = std::make_unique<Holding>();
  const auto reward = make_reward(holding->service.options());
  std::thread canceller([&] {
    while (holding->posts == 0) std::this_thread::sleep_for(Milliseconds(1));
    reward->cancel();
  });
  const auto results = reward->score(responses({"a"}), Deadline::after(Milliseconds(3600000)));
  canceller.join();
  EXPECT_TRUE(results[0].failed);
  holding->go = true;
}

// One byte now and then: no single read ever times out, the whole does.
TEST(HttpReward, ASlowDripTimesOut) {
  std::atomic<bool> stop{false};
  Service service([&](const httplib::Request&, httplib::Response& response) {
    response.set_chunked_content_provider("application/json", [&](size_t, httplib::DataSink& sink) {
      std::this_thread::sleep_for(Milliseconds(20));
      if (stop) return sink.done(), true;
      return sink.write(" ", 1);
    });
  });
  const auto results = make_reward(service.options())->score(responses({"a"}), Deadline::after(Milliseconds(400)));
  EXPECT_TRUE(results[0].failed);
  stop = true;
}

TEST(Grade, PairsAndTotals) {
  TemporaryDirectory folder;
  const auto file = folder.path() / "pairs.jsonl";
  std::ofstream(file) << "{\"gold\": \"1/2\", \"answer\": \"0.5\", \"label\": true}\n\n{\"gold\": 3, \"answer\": "
                         "\"4\", \"label\": true}\n"
                         "{\"gold\": \"7\", \"response\": \"I get 5, then 7.\"}\n";
  std::ostringstream out;
  const GradeTotals totals = grade_pairs(file, {}, out);
  EXPECT_EQ(totals.pairs, 3);
  EXPECT_EQ(totals.correct, 2);
  EXPECT_EQ(totals.labelled, 2);
  EXPECT_EQ(totals.disagreements, 1);
  EXPECT_NE(out.str().find("\"line\":3,\"correct\":false"), std::string::npos) << out.str();
  EXPECT_NE(out.str().find("\"extracted\":\"7\""), std::string::npos);
  EXPECT_NE(out.str().find("{\"total\":{\"pairs\":3,\"correct\":2"), std::string::npos);
}

TEST(Grade, MalformedLinesAreNamed) {
  TemporaryDirectory folder;
  const auto file = folder.path() / "pairs.jsonl";
  for (const char* line : {"{\"gold\": \"1\"}", "nonsense", "[1]", "{\"gold\": [], \"answer\": \"1\"}",
                           "{\"gold\": \"1\", \"answer\": \"1\", \"label\": 1}"}) {
    std::ofstream(file) << "{\"gold\": \"1\", \"answer\": \"1\"}\n" << line << "\n";
    std::ostringstream out;
    try {
      grade_pairs(file, {}, out);
      FAIL() << line;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kData);
      EXPECT_NE(std::string(error.what()).find("pairs.jsonl:2"), std::string::npos) << error.what();
    }
  }
  std::ostringstream out;
  EXPECT_THROW(grade_pairs(folder.path() / "missing.jsonl", {}, out), Error);
}

}  // namespace
}  // namespace trireme
