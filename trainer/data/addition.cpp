#include "trainer/data/addition.h"

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fs.h"

namespace trireme {

AdditionCounts write_addition_task(const AdditionTask& task, const std::filesystem::path& dir) {
  const int64_t side = task.largest - task.smallest + 1;
  if (task.smallest < 0 || task.largest <= task.smallest || task.largest > 9999) {
    fail_user("addition: the summands must be a range inside 0 to 9999");
  }
  const int64_t total = side * side;
  if (task.warm_start < 0 || task.held_out < 0 || task.warm_start + task.held_out >= total) {
    fail_user("addition: " + std::to_string(total) + " problems are too few for " + std::to_string(task.warm_start) +
              " warm-start and " + std::to_string(task.held_out) + " held-out ones; widen the range");
  }
  std::vector<int64_t> order(static_cast<size_t>(total));
  for (int64_t i = 0; i < total; ++i) order[static_cast<size_t>(i)] = i;
  std::mt19937_64 generator(static_cast<uint64_t>(task.seed));
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[generator() % i]);
  std::filesystem::create_directories(dir);
  const auto write = [&](const char* name, int64_t begin, int64_t end) {
    std::string text;
    const size_t digits = std::to_string(2 * task.largest).size();
    for (int64_t i = begin; i < end; ++i) {
      const int64_t a = task.smallest + order[static_cast<size_t>(i)] / side;
      const int64_t b = task.smallest + order[static_cast<size_t>(i)] % side;
      std::string sum = std::to_string(a + b);
      sum.insert(0, digits - sum.size(), '0');
      text += "{\"input\": \"" + std::to_string(a) + "+" + std::to_string(b) + "=\", \"output\": \"" + sum + "\"}\n";
    }
    write_file_atomic(dir / name, text);
  };
  write("held_out.jsonl", 0, task.held_out);
  write("warm_start.jsonl", task.held_out, task.held_out + task.warm_start);
  write("train.jsonl", task.held_out + task.warm_start, total);
  return {task.warm_start, total - task.warm_start - task.held_out, task.held_out};
}

}  // namespace trireme
