#include "trainer/checkpoint/fence.h"

#include <unistd.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/fs.h"
#include "base/host.h"
#include "base/log.h"
#include "base/text.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

// A lock is held for a rename and the removal of old checkpoints; a file server keeps that of a lost machine longer.
constexpr Milliseconds kLockTime{120000};

struct Holder {
  Claim claim;
  std::string host;
  int64_t process = 0;
};

fs::path file_of(const fs::path& directory) { return directory / ".fence"; }

// Nothing where nobody has been yet, or where what is there says nothing.
std::optional<Holder> read_holder(const fs::path& directory) {
  std::error_code missing;
  if (!fs::exists(file_of(directory), missing)) return std::nullopt;
  const nlohmann::json json = nlohmann::json::parse(read_file(file_of(directory)), nullptr, false);
  try {
    return Holder{
        {json.at("job").get<std::string>(), json.at("attempt").get<int64_t>(), json.at("owner").get<std::string>()},
        json.at("host").get<std::string>(),
        json.at("process").get<int64_t>()};
  } catch (const nlohmann::json::exception& error) {
    log_warn("checkpoint", file_of(directory).string() + " is damaged and counts as absent: " + error.what());
    return std::nullopt;
  }
}

fs::path lock_of(const fs::path& directory) { return directory / ".fence.lock"; }

[[noreturn]] void fail_newer(const fs::path& directory, const Holder& holder, const Claim& own) {
  throw Error(ErrorKind::kConflict, "the checkpoint folder " + directory.string() + " belongs to attempt " +
                                        std::to_string(holder.claim.attempt) + " of this job, on " + holder.host +
                                        "; this process is of attempt " + std::to_string(own.attempt) +
                                        " and writes nothing there any more");
}

}  // namespace

std::string random_owner() { return random_hex(); }

Fence::Fence(fs::path directory, Claim claim) : directory_(std::move(directory)), claim_(std::move(claim)) {
  std::error_code problem;
  fs::create_directories(directory_, problem);
  if (problem) fail_io("cannot make the checkpoint folder " + directory_.string() + ": " + problem.message());
  const FileLock held(lock_of(directory_), Deadline::after(kLockTime));
  if (!held.supported()) {
    log_warn("checkpoint", "the file system of " + directory_.string() +
                               " has no locks: a run of an older attempt is kept out of it except for an instant");
  }
  const std::optional<Holder> before = read_holder(directory_);
  if (before && before->claim.job == claim_.job && before->claim.attempt > claim_.attempt)
    fail_newer(directory_, *before, claim_);
  const nlohmann::json json = {{"job", claim_.job},
                               {"attempt", claim_.attempt},
                               {"owner", claim_.owner},
                               {"host", host_name()},
                               {"process", ::getpid()}};
  write_file_atomic(file_of(directory_), json.dump() + "\n");
}

void Fence::check() const {
  const std::optional<Holder> holder = read_holder(directory_);
  if (holder && holder->claim.owner == claim_.owner) return;
  if (holder && holder->claim.job == claim_.job && holder->claim.attempt > claim_.attempt)
    fail_newer(directory_, *holder, claim_);
  fail_user("the checkpoint folder " + directory_.string() + " was taken by " +
            (holder ? "another run, process " + std::to_string(holder->process) + " on " + holder->host
                    : std::string("nobody knows whom: its file .fence is gone")) +
            "; two runs cannot write to one folder, give each its own checkpointing.checkpoint_dir");
}

void Fence::guard(const std::function<void()>& work) const {
  const FileLock held(lock_of(directory_), Deadline::after(kLockTime));
  check();
  work();
}

}  // namespace trireme
