#include <fstream>
#include <iostream>

#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"
#include "trainer/algorithms/replay.h"
#include "trainer/cli/commands.h"
#include "trainer/cli/environment.h"
#include "trainer/data/addition.h"
#include "trainer/rewards/grade.h"
#include "trainer/rewards/http_headers.h"
#include "trainer/telemetry/report.h"

namespace trireme {
namespace {

int grade_verb(const std::string& pairs, RewardOptions options, const std::string& out) {
  GradeTotals totals;
  if (out == "-") {
    totals = grade_pairs(pairs, options, std::cout);
  } else {
    std::ofstream file(out);
    if (!file) fail_io("cannot write " + out);
    totals = grade_pairs(pairs, options, file);
  }
  return totals.disagreements == 0 && totals.failed == 0 ? 0 : 1;
}

}  // namespace

void add_tool_commands(CLI::App& app, CommandContext& context) {
  {
    auto options = std::make_shared<AdditionTask>();
    auto out = std::make_shared<std::string>();
    auto name = std::make_shared<std::string>();
    CLI::App* verb =
        app.add_subcommand("init-task", "write a synthetic task: warm-start, training and held-out problems");
    verb->add_option("task", *name, "addition")->required()->check(CLI::IsMember({"addition"}));
    verb->add_option("--out", *out, "folder")->required();
    verb->add_option("--smallest", options->smallest, "smallest number to add");
    verb->add_option("--largest", options->largest, "largest number to add");
    verb->add_option("--warm-start", options->warm_start, "how many problems with responses, for SFT");
    verb->add_option("--held-out", options->held_out, "how many problems for validation, in neither of the other sets");
    verb->add_option("--seed", options->seed);
    verb->callback([=, &context] {
      context.run = [=] {
        const AdditionCounts counts = write_addition_task(*options, *out);
        std::cout << *out << ": " << counts.warm_start << " warm-start, " << counts.train << " training, "
                  << counts.held_out << " held-out problems\n";
        return 0;
      };
    });
  }
  {
    auto pairs = std::make_shared<std::string>();
    auto out = std::make_shared<std::string>("-");
    auto options = std::make_shared<RewardOptions>();
    CLI::App* verb = app.add_subcommand("grade", "test a reward on pairs of gold and final answer");
    verb->add_option("--pairs", *pairs, "JSONL of {\"gold\", \"answer\"}")->required();
    verb->add_option("--reward", options->type, join(reward_names(), ", "));
    verb->add_option("--command", options->command, "command reward: the program and its arguments");
    verb->add_option("--url", options->url, "http reward: its URL");
    verb->add_option("--header", options->headers,
                     "http reward: \"Name: value\", with {env:NAME} or {file:PATH} for a secret; may be repeated");
    verb->add_option("--ca-file", options->ca_file,
                     "http reward: CA file that the server's certificate is checked with");
    verb->add_option("--pattern", options->pattern, "format reward: the pattern");
    verb->add_option("--out", *out);
    verb->callback([=, &context] {
      context.run = [=] {
        for (const std::string& name : environment_of_headers(options->headers))
          options->environment[name] = environment(name.c_str(), "");
        return grade_verb(*pairs, *options, *out);
      };
    });
  }
  {
    auto log = std::make_shared<std::string>();
    auto page = std::make_shared<std::string>("report.html");
    CLI::App* verb = app.add_subcommand("report", "write the HTML report of a step log");
    verb->add_option("log", *log, "the step log, train.jsonl")->required();
    verb->add_option("--out", *page);
    verb->callback([=, &context] {
      context.run = [=] {
        if (!std::filesystem::exists(*log)) fail_user("no step log " + *log);
        write_report(*log, *page, {});
        return 0;
      };
    });
  }
  {
    auto dump = std::make_shared<std::string>();
    auto model = std::make_shared<std::string>();
    auto device = std::make_shared<std::string>("auto");
    CLI::App* verb = app.add_subcommand("replay", "recompute a dumped optimizer step");
    verb->add_option("dump", *dump, "dump_step_N.safetensors")->required();
    verb->add_option("--model", *model, "folder with the weights from before the step: recompute the log-probs too");
    verb->add_option("--device", *device, "where the model runs; auto: CUDA if there is a GPU")
        ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
    verb->callback([=, &context] {
      context.run = [=] {
        replay(*dump, *model, *device, std::cout);
        return 0;
      };
    });
  }
}

}  // namespace trireme
