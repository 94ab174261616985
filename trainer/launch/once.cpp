#include "trainer/launch/once.h"

#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/subprocess.h"
#include "base/text.h"

namespace trireme {
namespace {

bool done(const OnceOptions& options, const std::string& wanted) {
  try {
    return std::filesystem::exists(options.marker) && read_file(options.marker) == wanted;
  } catch (const Error&) {
    return false;  // taken away between the two calls
  }
}

}  // namespace

int run_once(const OnceOptions& options, const std::atomic<int>* signal) {
  TRIREME_CHECK(!options.command.empty(), "run_once without a command");
  std::string wanted;
  for (const std::string& argument : options.command) wanted += argument + "\n";
  const auto interrupted = [&] { return signal != nullptr && signal->load() != 0; };
  const Deadline deadline = Deadline::after(options.timeout);
  const std::string limit = format_fixed(static_cast<double>(options.timeout.count()) / 1000, 0) + " s";
  if (done(options, wanted)) {
    log_info("once", "already done: " + options.marker.string());
    return 0;
  }
  if (options.node_rank != 0) {
    log_info("once", "waiting for node 0 to write " + options.marker.string());
    while (!done(options, wanted)) {
      if (interrupted()) return 128 + signal->load();
      if (deadline.passed()) {
        fail_timeout("node 0 did not write " + options.marker.string() + " within " + limit +
                     ": its log says why; is the folder on a volume that all nodes share?");
      }
      std::this_thread::sleep_for(Milliseconds(200));
    }
    return 0;
  }
  std::error_code ignored;
  std::filesystem::remove(options.marker, ignored);
  SpawnOptions spawn;
  spawn.argv = options.command;
  if (!options.program.empty()) spawn.argv.insert(spawn.argv.begin(), options.program);
  Subprocess child = Subprocess::spawn(spawn);
  bool forwarded = false;
  while (true) {
    if (const auto status = child.poll()) {
      if (!status->ok()) return status->signal != 0 ? 128 + status->signal : status->code;
      break;
    }
    if (interrupted() && !forwarded) {
      forwarded = true;
      child.signal(signal->load());
    }
    if (deadline.passed()) {
      child.terminate(Milliseconds(5000));
      fail_timeout(join(options.command, " ") + ": not done within " + limit);
    }
    std::this_thread::sleep_for(Milliseconds(20));
  }
  std::filesystem::create_directories(options.marker.parent_path(), ignored);
  write_file_atomic(options.marker, wanted);
  return 0;
}

}  // namespace trireme
