// Checkpoints: written beside the run to a temporary name and renamed, found again, pruned by metric.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "trainer/checkpoint/background_save.h"
#include "trainer/checkpoint/catalogue.h"
#include "trainer/checkpoint/fence.h"
#include "trainer/checkpoint/staging.h"
#include "trainer/model/model.h"
#include "trainer/optimizer/adamw.h"
#include "trainer/parallel/context.h"

namespace trireme {

struct CheckpointOptions {
  std::filesystem::path directory;
  std::string folder = "policy";  // of the first model, in each checkpoint
  // Another manager's directory, whose steps are kept here too, and no others but newer ones; keep_top_k says nothing
  // then. Empty: none.
  std::filesystem::path follows;
  std::filesystem::path source_dir;  // tokenizer files and generation_config.json come from here
  std::string metric_name;           // "" : keep the newest
  bool higher_is_better = true;
  int64_t keep_top_k = 3;  // 0: keep all
  bool save_optimizer = true;
  std::string job;      // its UID, or nothing (Claim)
  int64_t attempt = 0;  // of the job
  // Host memory of this rank for what is copied and not written yet; 0: a share of half of what is available.
  int64_t staging_bytes = 0;
  int64_t staging_block_bytes = int64_t{64} << 20;
  // So long a save may stand still, on its own rank and of others that a rank waits for.
  Milliseconds patience{600000};
  OpenSink open_file;  // empty: an AtomicFile
};

// A save that is done.
struct SavedCheckpoint {
  int64_t step = 0;
  int64_t bytes = 0;        // of this rank
  double seconds = 0;       // until it had its name
  double wait_seconds = 0;  // of these the training thread waited
};

// Writes checkpoints beside the run. All ranks call the collective ones together, from the training thread, as
// everything here but where something else is said.
class CheckpointManager final {
 public:
  // `fingerprint`: what must be equal for a resume, e.g. {"algorithm": ..., "model": {...}}. Touches no file.
  CheckpointManager(const CheckpointOptions& options, const nlohmann::json& fingerprint, ParallelContext& context);
  // A save under way is finished where this is the only rank, else given up: the run ends with an error, since finish()
  // was not called.
  ~CheckpointManager();
  CheckpointManager(const CheckpointManager&) = delete;
  CheckpointManager& operator=(const CheckpointManager&) = delete;

  // Before open(): every checkpoint also holds this model, in its folder "NAME/weights" and "NAME/optimizer", as the
  // policy's are in "policy/". `ranks`: the manager's, in the layout of this model; null: that is theirs. All outlive
  // the manager.
  void add(const std::string& name, Model& model, DistributedAdamW& optimizer, const std::filesystem::path& source_dir,
           ParallelContext* ranks = nullptr);

  // Collective. Takes the folder (Fence), removes what others left unfinished, and begins to set host memory aside.
  // The first load_latest() or begin_save() does it otherwise.
  void open(const Model& model, const DistributedAdamW& optimizer);
  // Returns when the memory is there; for benchmarks.
  void wait_reserved();

  // Collective. Returns as soon as the save before has ended and this one is under way: the weights and the optimizer
  // state must stay as they are until wait_copied(). Throws on every rank what went wrong with the one before. `files`:
  // further ones, by their names in the checkpoint's folder; rank 0's are written.
  void begin_save(int64_t step, const Model& model, const DistributedAdamW& optimizer, const nlohmann::json& state,
                  const std::map<std::string, double>& metrics, const std::string& config_yaml,
                  const std::map<std::string, std::string>& files = {});
  // Returns when nothing reads weights and optimizer state any more, or reading them has failed. Throws Error(kIo) when
  // nothing has moved for `patience`.
  void wait_copied();
  // Collective. Returns when the save under way, if there is one, has its name and is durable. Throws on every rank
  // when one could not write: the checkpoints before are still there.
  void finish();
  // Begins and finishes.
  void save(int64_t step, const Model& model, const DistributedAdamW& optimizer, const nlohmann::json& state,
            const std::map<std::string, double>& metrics, const std::string& config_yaml);

  // What is under way has failed on this rank. Then all ranks call abandon() ...
  bool failed() const;
  // ... or this one throws why, and the others hear of it as of any failure.
  void throw_failure() const;
  // Collective. Gives up what is under way; throws why on every rank.
  [[noreturn]] void abandon();
  // The last save, once: when it is done on this rank; of rank 0 it has its name then.
  std::optional<SavedCheckpoint> take_saved();

  // Collective. Loads weights and optimizer of the newest complete checkpoint; nothing when there is none. Throws
  // Error(kUser) when it belongs to another model or algorithm, naming the first difference.
  std::optional<CheckpointInfo> load_latest(Model& model, DistributedAdamW& optimizer);

  // Collective. Loads the checkpoint of exactly this step: from `other`, a directory of another manager's checkpoints,
  // if its own has this model's folder, else from this one's directory. Throws Error(kUser) that names both where
  // neither is there.
  CheckpointInfo load_step(int64_t step, const std::filesystem::path& other, Model& model, DistributedAdamW& optimizer);
  // Where it follows another directory: removes what that does not have, at the end of a run. Rank 0's turn, no save
  // under way.
  void tidy();

  int64_t last_saved_step() const { return last_saved_step_; }  // or the one that is being saved

  // Called about once a second in waits, as long as bytes move. May be empty.
  std::function<void()> on_wait;
  // On each rank's writing thread, at most once a second, while it writes. May be empty.
  std::function<void()> on_written;
  // On rank 0's writing thread: when all parts are written, before the checkpoint gets its name, which it does not when
  // this throws; and when it has it. What before_commit throws is a peer's failure: its kind is kept. It calls `moves`
  // as long as what it waits for goes on, so that the other ranks wait too. May be empty.
  std::function<void(int64_t step, const std::atomic<bool>& cancelled, const std::function<void()>& moves)>
      before_commit;
  std::function<void(int64_t step)> committed;

 private:
  struct Failure;
  struct Pending;
  struct Further {
    std::string name;
    Model* model = nullptr;
    DistributedAdamW* optimizer = nullptr;
    std::filesystem::path source_dir;
    ParallelContext* ranks = nullptr;
  };
  void together(const std::string& what, const std::optional<Failure>& own);
  Failure own_failure(const std::exception& error, bool of_peer = false) const;
  void end_pending(bool give_up);
  Patience patience() const;
  int64_t moved(bool of_others) const;
  void wait_while(const std::function<bool(Milliseconds)>& done, Patience& patience);
  void wait_for_others(Patience& patience);
  void report_part(int64_t number, const std::string& error);
  void report_moving(Pending& pending);
  void wait_for_parts(Pending& pending, const std::atomic<bool>& cancelled);
  void wait_for_peer(Pending& pending, const std::atomic<bool>& cancelled);
  void commit(Pending& pending);
  std::vector<int64_t> steps_to_prune(int64_t newest) const;
  void prune(int64_t newest);
  std::string key(int64_t number, const std::string& what) const;
  void load_from(const CheckpointInfo& info, const std::filesystem::path& folder, Model& model,
                 DistributedAdamW& optimizer) const;

  CheckpointOptions options_;
  nlohmann::json fingerprint_;
  ParallelContext& context_;
  std::vector<Further> further_;
  int64_t last_saved_step_ = -1;
  int64_t saves_ = 0;  // begun; the same on all ranks
  std::string owner_;  // of this start; the same on all ranks; empty: not open
  std::optional<SavedCheckpoint> saved_;
  std::unique_ptr<Fence> fence_;  // rank 0
  std::unique_ptr<StagingPool> pool_;
  std::unique_ptr<StateReader> reader_;
  std::unique_ptr<Pending> pending_;  // the save under way; ends before the two above
};

}  // namespace trireme
