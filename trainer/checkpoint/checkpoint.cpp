#include "trainer/checkpoint/checkpoint.h"

#include <unistd.h>

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/fs.h"
#include "base/host.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/model/model_folder.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

// "model.hidden_size is 64 there and 128 here"
std::optional<std::string> first_difference(const nlohmann::json& there, const nlohmann::json& here,
                                            const std::string& path) {
  if (there == here) return std::nullopt;
  if (there.is_object() && here.is_object()) {
    std::set<std::string> keys;
    for (const auto& [key, unused] : there.items()) keys.insert(key);
    for (const auto& [key, unused] : here.items()) keys.insert(key);
    for (const std::string& key : keys) {
      if (auto found = first_difference(there.value(key, nlohmann::json()), here.value(key, nlohmann::json()),
                                        path.empty() ? key : path + "." + key)) {
        return found;
      }
    }
  }
  return path + " is " + there.dump() + " there and " + here.dump() + " here";
}

void sync_tree(const fs::path& root) {
  sync_directory(root);
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    if (entry.is_directory()) sync_directory(entry.path());
  }
}

[[noreturn]] void fail_of_another_run(const fs::path& checkpoint, const std::string& difference) {
  fail_user("checkpoint " + checkpoint.string() + " belongs to another run: " + difference +
            "; choose another checkpointing.checkpoint_dir");
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// The files of the weights. Of a split model without their tensors: only names, shapes and sizes.
ShardPlan weights_of(const Model& model) {
  NamedTensors tensors;
  if (model.options().split) {
    const auto options = model.flat_parameters().options().device(at::kMeta).requires_grad(false);
    for (const ModelParameter& parameter : model_parameters(model.config().shape()))
      tensors.emplace_back(parameter.name, at::empty(parameter.shape, options));
  } else {
    for (const Parameter& parameter : model.parameters())
      tensors.emplace_back(parameter.name, parameter.tensor.detach().contiguous());
  }
  return plan_shards(tensors, SaveOptions{}.max_shard_bytes);
}

// Which rank writes a file of the weights: of a whole model the first, else all in turn, one copy of them after the
// other.
struct FileOwner {
  int copy = 0, rank = 0;  // of those that hold it
};
FileOwner owner_of(size_t file, const Model& model, ParallelContext& context) {
  if (!model.options().split) return {};
  const auto copies = static_cast<size_t>(context.copies());
  return {static_cast<int>(file % copies),
          static_cast<int>(file / copies % static_cast<size_t>(context.holders().size()))};
}

bool is_mine(const FileOwner& owner, ParallelContext& context) {
  return owner.copy == context.copy() && owner.rank == context.holders().rank();
}

// This rank's files. A split model's are gathered among those that hold it together, tensor by tensor: the state of
// now, so that nobody needs to wait for them. Collective then.
std::vector<TensorFile> own_weights(ShardPlan plan, const Model& model, ParallelContext& context,
                                    const std::string& folder) {
  std::vector<TensorFile> own;
  for (size_t i = 0; i < plan.files.size(); ++i) {
    const FileOwner owner = owner_of(i, model, context);
    TensorFile& file = plan.files[i];
    if (model.options().split && owner.copy == context.copy()) {
      for (auto& [name, tensor] : file.tensors) tensor = gather_parameter(model, context.holders(), name, owner.rank);
    }
    if (!is_mine(owner, context)) continue;
    file.name = folder + "/weights/" + file.name;
    own.push_back(std::move(file));
  }
  return own;
}

}  // namespace

std::string CheckpointManager::key(int64_t number, const std::string& what) const {
  return context_.role_keys() + "checkpoint-" + std::to_string(number) + "-" + what;
}

struct CheckpointManager::Failure {
  ErrorKind kind;
  std::string what;
};

struct CheckpointManager::Pending {
  int64_t step = 0;
  int64_t number = 0;
  fs::path temporary, target;
  nlohmann::json manifest;                     // without the files
  std::map<std::string, std::string> indexes;  // of each model's weights, by its folder; may be empty
  double wait_seconds = 0;
  bool told = false;                       // by take_saved()
  SteadyClock::time_point next_sign{};     // of life to the others; the writing thread's own
  std::atomic<bool> others_failed{false};  // rank 0: another rank's part will not come
  std::atomic<bool> peer_failed{false};    // rank 0: what it waits for before the commit will not come
  std::unique_ptr<BackgroundSave> save;    // last: its threads use the rest

  std::string what() const { return "saving checkpoint " + target.string(); }
  SavedCheckpoint saved() const { return {step, save->bytes(), save->seconds(), wait_seconds}; }
};

CheckpointManager::CheckpointManager(const CheckpointOptions& options, const nlohmann::json& fingerprint,
                                     ParallelContext& context)
    : options_(options), fingerprint_(fingerprint), context_(context) {
  if (!options_.open_file) {
    options_.open_file = [](const fs::path& path) -> std::unique_ptr<ByteSink> {
      return std::make_unique<AtomicFile>(path);
    };
  }
}

CheckpointManager::~CheckpointManager() {
  on_wait = nullptr;  // what it speaks to may be gone
  if (pending_ == nullptr) return;
  try {
    Patience own = patience();
    if (context_.job_size() == 1)
      wait_while([this](Milliseconds time) { return pending_->save->wait_finished(time); }, own);
  } catch (const std::exception& error) {
    log_warn("checkpoint", error.what());
  }
  const bool whole = context_.job_size() == 1 && pending_->save->finished() && !pending_->save->failed();
  const std::string why =
      pending_->save->failed() ? "" : ": the run ends with an error before all its parts are written";
  const fs::path temporary = pending_->temporary;
  if (!whole) log_warn("checkpoint", pending_->target.string() + " was not finished" + why);
  pending_ = nullptr;
  std::error_code ignored;
  if (context_.is_main() && !whole) fs::remove_all(temporary, ignored);
}

// Every rank learns whether all succeeded; the first error is thrown everywhere.
void CheckpointManager::together(const std::string& what, const std::optional<Failure>& own) {
  const std::string mine = own ? std::to_string(static_cast<int>(own->kind)) + " " + own->what : "";
  const std::vector<std::string> failures = context_.world().all_gather_bytes(mine);
  for (size_t rank = 0; rank < failures.size(); ++rank) {
    const std::string& failure = failures[rank];
    if (failure.empty()) continue;
    const size_t space = failure.find(' ');
    throw Error(static_cast<ErrorKind>(parse_int(failure.substr(0, space)).value_or(0)),
                what + " failed" + (failures.size() > 1 ? " on rank " + std::to_string(rank) : "") + ": " +
                    failure.substr(space + 1));
  }
}

// Whoever has taken the folder away is the cause of what fails in it.
CheckpointManager::Failure CheckpointManager::own_failure(const std::exception& error, bool of_peer) const {
  const auto describe = [of_peer](const std::exception& what) {
    const auto* ours = dynamic_cast<const Error*>(&what);
    const ErrorKind kind = ours == nullptr ? ErrorKind::kIo : ours->kind();
    if (of_peer) return Failure{kind, first_line(what.what())};
    // Those two mean that a peer is to blame.
    const bool echo = kind == ErrorKind::kTimeout || kind == ErrorKind::kUnavailable;
    return Failure{echo ? ErrorKind::kIo : kind, first_line(what.what())};
  };
  try {
    if (fence_ != nullptr) fence_->check();
  } catch (const std::exception& taken) {
    return describe(taken);
  }
  return describe(error);
}

void CheckpointManager::add(const std::string& name, Model& model, DistributedAdamW& optimizer,
                            const fs::path& source_dir, ParallelContext* ranks) {
  TRIREME_CHECK(owner_.empty(), "a further model of checkpoints");
  further_.push_back({name, &model, &optimizer, source_dir, ranks != nullptr ? ranks : &context_});
}

void CheckpointManager::open(const Model& model, const DistributedAdamW& optimizer) {
  std::optional<Failure> failure;
  std::string owner;
  if (context_.is_main()) {
    owner = random_owner();
    try {
      fence_ = std::make_unique<Fence>(options_.directory, Claim{options_.job, options_.attempt, owner});
      fence_->guard([this] {
        for (const auto& entry : fs::directory_iterator(options_.directory)) {
          if (!starts_with(entry.path().filename().string(), "tmp_step_")) continue;
          log_info("checkpoint", "removing the unfinished " + entry.path().string());
          std::error_code ignored;
          fs::remove_all(entry.path(), ignored);
        }
      });
    } catch (const std::exception& error) {
      failure = own_failure(error);
    }
  }
  together("taking the checkpoint folder " + options_.directory.string(), failure);
  owner_ = context_.world().all_gather_bytes(owner).front();

  int64_t own = 0, files = 0;
  const auto count = [&](const Model& one, const DistributedAdamW& its, ParallelContext& ranks) {
    if (options_.save_optimizer) own += its.saved().tensor_bytes();
    ++files;
    const ShardPlan weights = weights_of(one);
    for (size_t i = 0; i < weights.files.size(); ++i) {
      if (!is_mine(owner_of(i, one, ranks), ranks)) continue;
      own += weights.files[i].tensor_bytes();
      ++files;
    }
  };
  count(model, optimizer, context_);
  for (const Further& more : further_) count(*more.model, *more.optimizer, *more.ranks);
  int64_t limit = options_.staging_bytes;
  const std::string host = host_name() + " ";
  const std::vector<std::string> needs = context_.world().all_gather_bytes(host + std::to_string(own));
  if (limit == 0) {
    int64_t all = 0;
    for (const std::string& need : needs) {
      if (starts_with(need, host)) all += parse_int(need.substr(host.size())).value_or(0);
    }
    limit = staging_share(own, all, available_host_memory());
  }
  if (limit < own) {
    log_info("checkpoint", "this rank's part of a checkpoint is " + format_bytes(static_cast<uint64_t>(own)) + ", " +
                               format_bytes(static_cast<uint64_t>(limit)) +
                               " of host memory may hold what is not written yet: optimizer steps wait for the rest");
  }
  const at::Device device = model.options().device;
  // The last block of a file is seldom full.
  const int64_t blocks_bytes = limit < own ? limit : own + files * options_.staging_block_bytes;
  pool_ = std::make_unique<StagingPool>(device, blocks_bytes, options_.staging_block_bytes);
  reader_ = std::make_unique<StateReader>(device);
  pool_->reserve(blocks_bytes);
}

void CheckpointManager::wait_reserved() {
  if (pool_ != nullptr) pool_->wait_reserved();
}

void CheckpointManager::begin_save(int64_t step, const Model& model, const DistributedAdamW& optimizer,
                                   const nlohmann::json& state, const std::map<std::string, double>& metrics,
                                   const std::string& config_yaml, const std::map<std::string, std::string>& files) {
  if (owner_.empty()) open(model, optimizer);
  Stopwatch watch;
  finish();
  auto pending = std::make_unique<Pending>();
  Pending& p = *pending;
  p.step = step;
  p.number = ++saves_;
  const std::string name = "step_" + std::to_string(step);
  p.temporary = options_.directory / ("tmp_" + name + "." + owner_);
  p.target = options_.directory / name;
  p.manifest = {{"format", kCheckpointFormat},
                {"step", step},
                {"fingerprint", fingerprint_},
                {"ranks", context_.world_size()},
                {"has_optimizer", options_.save_optimizer},
                {"state", state},
                {"metrics", metrics}};
  BackgroundSave::Work work;
  work.folder = p.temporary;
  work.open = options_.open_file;
  const auto take = [&](const Model& one, const DistributedAdamW& its, const std::string& folder,
                        ParallelContext& ranks) {
    ShardPlan weights = weights_of(one);
    p.indexes[folder] = weights.index;
    for (TensorFile& file : own_weights(std::move(weights), one, ranks, folder)) work.files.push_back(std::move(file));
    if (!options_.save_optimizer) return;
    work.files.push_back(its.saved());
    work.files.back().name = folder + "/optimizer/" + work.files.back().name;
  };
  take(model, optimizer, options_.folder, context_);
  for (const Further& more : further_) take(*more.model, *more.optimizer, more.name, *more.ranks);
  work.prepare = [this, &p, &model, config_yaml, files] {
    const auto describe = [&](const Model& one, const std::string& folder, const fs::path& source) {
      fs::create_directories(p.temporary / folder / "optimizer");
      fs::create_directories(p.temporary / folder / "weights");
      if (!context_.is_main()) return;
      SaveOptions save;
      save.source_dir = source;
      save_model_description(one, p.temporary / folder / "weights", save);
    };
    describe(model, options_.folder, options_.source_dir);
    for (const Further& more : further_) describe(*more.model, more.name, more.source_dir);
    if (!context_.is_main()) return;
    write_file_atomic(p.temporary / "config.yaml", config_yaml);
    for (const auto& [name, bytes] : files) write_file_atomic(p.temporary / name, bytes);
  };
  work.written = [this, &p] { report_moving(p); };
  work.commit = [this, &p](const std::atomic<bool>& cancelled) {
    report_part(p.number, "");
    if (!context_.is_main()) return;
    wait_for_parts(p, cancelled);
    wait_for_peer(p, cancelled);
    if (cancelled.load()) return;
    commit(p);
    if (committed) committed(p.step);
  };
  work.failed = [this, &p](const std::exception& error) { report_part(p.number, first_line(error.what())); };
  reader_->mark();
  p.save = std::make_unique<BackgroundSave>(std::move(work), *pool_, *reader_);
  pending_ = std::move(pending);
  last_saved_step_ = step;
  pending_->wait_seconds = watch.seconds();
}

// Through the store, whose calls any thread may make, since the training thread's collectives go on meanwhile.
void CheckpointManager::report_part(int64_t number, const std::string& error) {
  JobStore* store = context_.store();
  if (store == nullptr) return;
  const std::string rank = std::to_string(context_.rank());
  if (!error.empty()) {
    store->set(key(number, "failed"), rank);
    return;
  }
  store->set(key(number, "part-" + rank), "");
  store->add(key(number, "parts"), 1);
}

// Whoever waits for this save is patient while these come.
void CheckpointManager::report_moving(Pending& pending) {
  const auto now = SteadyClock::now();
  if (now < pending.next_sign) return;
  pending.next_sign = now + std::clamp(options_.patience / 60, Milliseconds(1), Milliseconds(1000));
  if (JobStore* store = context_.store()) (void)store->add(key(pending.number, "moved"), 1);
  if (on_written) on_written();
}

void CheckpointManager::wait_for_parts(Pending& pending, const std::atomic<bool>& cancelled) {
  JobStore* store = context_.store();
  if (store == nullptr) return;
  Patience patience(options_.patience);
  for (Milliseconds pause(5); !cancelled.load(); pause = std::min(2 * pause, Milliseconds(100))) {
    if (store->add(key(pending.number, "parts"), 0) >= context_.world_size()) return;
    if (store->has(key(pending.number, "failed"))) {
      pending.others_failed.store(true);
      fail_io("rank " + store->get(key(pending.number, "failed")) + " could not write its part");
    }
    patience.moved(store->add(key(pending.number, "moved"), 0));
    if (patience.passed()) break;
    std::this_thread::sleep_for(pause);
  }
  if (cancelled.load()) return;
  std::string ranks;
  for (int rank = 0; rank < context_.world_size(); ++rank) {
    if (!store->has(key(pending.number, "part-" + std::to_string(rank)))) ranks += " " + std::to_string(rank);
  }
  fail_io("nothing has been written for " + std::to_string(patience.seconds()) +
          " s, and the part of these ranks is not written:" + ranks);
}

void CheckpointManager::wait_for_peer(Pending& pending, const std::atomic<bool>& cancelled) {
  if (!before_commit || cancelled.load()) return;
  try {
    before_commit(pending.step, cancelled, [&] { report_moving(pending); });
  } catch (const std::exception&) {
    pending.peer_failed.store(true);
    throw;
  }
}

// Under the fence: whoever takes the folder finds this checkpoint whole, or never.
void CheckpointManager::commit(Pending& pending) {
  for (const auto& [folder, index] : pending.indexes) {
    if (!index.empty()) write_file_atomic(pending.temporary / folder / "weights" / kShardIndex, index);
  }
  nlohmann::json files = nlohmann::json::array();
  for (const auto& entry : fs::recursive_directory_iterator(pending.temporary)) {
    if (!entry.is_regular_file()) continue;
    files.push_back({{"name", fs::relative(entry.path(), pending.temporary).string()}, {"size", entry.file_size()}});
  }
  nlohmann::json manifest = pending.manifest;
  manifest["files"] = std::move(files);
  write_file_atomic(pending.temporary / "manifest.json", manifest.dump(1));
  sync_tree(pending.temporary);
  report_moving(pending);
  fence_->guard([&] {
    fs::remove_all(pending.target);  // the same step saved again after a resume
    fs::rename(pending.temporary, pending.target);
    sync_directory(options_.directory);
    prune(pending.step);
  });
}

// `newest`: kept where another directory is followed, which does not have it yet.
std::vector<int64_t> CheckpointManager::steps_to_prune(int64_t newest) const {
  if (!options_.follows.empty())
    return steps_not_among(checkpoint_steps(options_.directory), checkpoint_steps(options_.follows), newest);
  return steps_to_remove(list_checkpoints(options_.directory), options_.metric_name, options_.higher_is_better,
                         options_.keep_top_k);
}

// Throws nothing: what has been saved is durable, whatever becomes of what is older.
void CheckpointManager::prune(int64_t newest) {
  try {
    for (const int64_t old : steps_to_prune(newest)) {
      std::error_code error;
      fs::remove_all(options_.directory / ("step_" + std::to_string(old)), error);
      if (error) log_warn("checkpoint", "cannot remove step_" + std::to_string(old) + ": " + error.message());
    }
  } catch (const std::exception& error) {
    log_warn("checkpoint", std::string("older checkpoints are kept: ") + error.what());
  }
}

void CheckpointManager::tidy() {
  if (options_.follows.empty() || !context_.is_main() || fence_ == nullptr) return;
  fence_->guard([this] { prune(/*newest=*/-1); });
}

// Of the training thread. Rank 0's writing thread, which waits for the others, loses its own first: it names them.
Patience CheckpointManager::patience() const {
  return Patience(options_.patience + options_.patience / 4 + Milliseconds(1000));
}

// Bytes of this rank, and signs of life of all: only whether it grows counts.
int64_t CheckpointManager::moved(bool of_others) const {
  JobStore* store = of_others ? context_.store() : nullptr;
  return pending_->save->moved() + (store == nullptr ? 0 : store->add(key(pending_->number, "moved"), 0));
}

// In slices: who watches the run hears that it goes on, and a disk that stands still is an error. A save of rank 0 goes
// on while those that it waits for do.
void CheckpointManager::wait_while(const std::function<bool(Milliseconds)>& done, Patience& patience) {
  while (!done(Milliseconds(1000))) {
    if (patience.moved(moved(/*of_others=*/context_.is_main()))) {
      if (on_wait) on_wait();
    } else if (patience.passed()) {
      fail_io(pending_->what() + ": nothing has been written for " + std::to_string(patience.seconds()) +
              " s; the disk or its server does not answer");
    }
  }
}

// Returns when the save has ended on all ranks. The deadline of a collective is not for it: a disk may be slow. Where
// one fails or stands still, the collective that follows says who.
void CheckpointManager::wait_for_others(Patience& patience) {
  JobStore* store = context_.store();
  if (store == nullptr) return;
  const std::string ended = key(pending_->number, "ended");
  Milliseconds pause(5);
  for (int64_t ranks = store->add(ended, 1); ranks < context_.world_size(); ranks = store->add(ended, 0)) {
    if (patience.moved(moved(/*of_others=*/true))) {
      if (on_wait) on_wait();
    } else if (patience.passed() || context_.failure_of_another()) {
      return;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, Milliseconds(500));
  }
}

void CheckpointManager::wait_copied() {
  if (pending_ == nullptr) return;
  Stopwatch watch;
  Patience own = patience();
  wait_while([this](Milliseconds time) { return pending_->save->wait_copied(time); }, own);
  pending_->wait_seconds += watch.seconds();
}

void CheckpointManager::end_pending(bool give_up) {
  if (give_up) pending_->save->cancel();
  Stopwatch watch;
  Patience own = patience();
  wait_while([this](Milliseconds time) { return pending_->save->wait_finished(time); }, own);
  wait_for_others(own);
  pending_->wait_seconds += watch.seconds();
  std::optional<Failure> failure;
  try {
    if (const std::exception_ptr error = pending_->save->error()) std::rethrow_exception(error);
  } catch (const std::exception& error) {
    failure = own_failure(error, pending_->peer_failed.load());
    const bool taken = failure->kind == ErrorKind::kConflict || failure->kind == ErrorKind::kUser;
    if (pending_->others_failed.load() && !taken) failure.reset();  // they tell it themselves
  }
  const std::unique_ptr<Pending> pending = std::move(pending_);
  try {
    together(pending->what(), failure);
    if (give_up) fail_internal(pending->what() + " was given up, and no rank says why");
  } catch (...) {
    pending->save = nullptr;
    std::error_code ignored;
    if (context_.is_main()) fs::remove_all(pending->temporary, ignored);
    throw;
  }
  if (!pending->told) saved_ = pending->saved();
  pending->save = nullptr;
  pool_->trim();
}

void CheckpointManager::finish() {
  if (pending_ != nullptr) end_pending(/*give_up=*/false);
}

void CheckpointManager::save(int64_t step, const Model& model, const DistributedAdamW& optimizer,
                             const nlohmann::json& state, const std::map<std::string, double>& metrics,
                             const std::string& config_yaml) {
  begin_save(step, model, optimizer, state, metrics, config_yaml);
  finish();
}

bool CheckpointManager::failed() const { return pending_ != nullptr && pending_->save->failed(); }

void CheckpointManager::throw_failure() const {
  if (!failed()) return;
  try {
    std::rethrow_exception(pending_->save->error());
  } catch (const std::exception& error) {
    const Failure failure = own_failure(error);
    throw Error(failure.kind, pending_->what() + " failed: " + failure.what);
  }
}

void CheckpointManager::abandon() {
  TRIREME_CHECK(pending_ != nullptr, "there is no save to abandon");
  end_pending(/*give_up=*/true);
  fail_internal("a save that was given up went well");
}

std::optional<SavedCheckpoint> CheckpointManager::take_saved() {
  if (saved_) return std::exchange(saved_, std::nullopt);
  if (pending_ == nullptr || pending_->told || !pending_->save->finished() || pending_->save->failed())
    return std::nullopt;
  pending_->told = true;
  return pending_->saved();
}

void CheckpointManager::load_from(const CheckpointInfo& info, const fs::path& folder, Model& model,
                                  DistributedAdamW& optimizer) const {
  load_parameters(model, folder / "weights");
  if (info.has_optimizer) {
    optimizer.load(folder / "optimizer");
  } else {
    optimizer.reset_master_from_weights();
  }
}

CheckpointInfo CheckpointManager::load_step(int64_t step, const fs::path& other, Model& model,
                                            DistributedAdamW& optimizer) {
  if (owner_.empty()) open(model, optimizer);
  const std::string name = "step_" + std::to_string(step);
  const fs::path theirs = other / name, own = options_.directory / name;
  std::string chosen;
  if (context_.is_main()) {
    if (fs::exists(theirs / options_.folder / "weights"))
      chosen = theirs.string();
    else if (fs::exists(own / options_.folder / "weights"))
      chosen = own.string();
  }
  chosen = context_.world().all_gather_bytes(chosen).front();
  if (chosen.empty()) {
    fail_user("checkpoint " + theirs.string() + " has no " + options_.folder + ": neither " +
              (theirs / options_.folder).string() + " nor " + own.string() +
              " is there; choose another checkpointing.checkpoint_dir");
  }
  const CheckpointInfo info = read_checkpoint(chosen);
  const nlohmann::json manifest = nlohmann::json::parse(read_file(info.path / "manifest.json"));
  for (const auto& [entry, value] : fingerprint_.items()) {
    const nlohmann::json there = manifest.at("fingerprint").value(entry, nlohmann::json());
    if (const auto difference = first_difference(there, value, entry)) fail_of_another_run(info.path, *difference);
  }
  load_from(info, info.path / options_.folder, model, optimizer);
  if (!info.has_optimizer) log_warn("checkpoint", chosen + " holds no optimizer state: its moments start from zero");
  last_saved_step_ = step;
  return info;
}

std::optional<CheckpointInfo> CheckpointManager::load_latest(Model& model, DistributedAdamW& optimizer) {
  if (owner_.empty()) open(model, optimizer);
  // Rank 0 decides, so that all load the same one while folders come and go.
  std::string chosen;
  if (context_.is_main()) {
    std::vector<std::string> warnings;
    const std::vector<CheckpointInfo> all = list_checkpoints(options_.directory, &warnings);
    for (const std::string& warning : warnings) log_warn("checkpoint", warning);
    if (!all.empty()) chosen = all.back().path.string();
  }
  chosen = context_.world().all_gather_bytes(chosen).front();
  if (chosen.empty()) return std::nullopt;
  const CheckpointInfo info = read_checkpoint(chosen);
  const nlohmann::json manifest = nlohmann::json::parse(read_file(fs::path(chosen) / "manifest.json"));
  if (const auto difference = first_difference(manifest.at("fingerprint"), fingerprint_, ""))
    fail_of_another_run(info.path, *difference);
  load_from(info, info.path / options_.folder, model, optimizer);
  for (const Further& more : further_) {
    if (fs::exists(info.path / more.name)) {
      load_from(info, info.path / more.name, *more.model, *more.optimizer);
      continue;
    }
    // Ranks of its own have saved it.
    const fs::path other = options_.directory / more.name / info.path.filename();
    if (!fs::exists(other / "manifest.json")) {
      fail_user("checkpoint " + chosen + " has no " + more.name + ": neither " + (info.path / more.name).string() +
                " nor " + other.string() + " is there; choose another checkpointing.checkpoint_dir");
    }
    load_from(read_checkpoint(other), other / more.name, *more.model, *more.optimizer);
  }
  if (!info.has_optimizer) log_warn("checkpoint", chosen + " holds no optimizer state: its moments start from zero");
  last_saved_step_ = info.step;
  return info;
}

}  // namespace trireme
