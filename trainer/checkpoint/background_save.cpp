#include "trainer/checkpoint/background_save.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace trireme {

BackgroundSave::BackgroundSave(Work work, StagingPool& pool, StateReader& reader)
    : work_(std::move(work)), pool_(pool), reader_(reader) {
  for (const TensorFile& file : work_.files) {
    bytes_ += file.tensor_bytes();
    headers_.push_back(file.header());
    for (const auto& [name, tensor] : file.tensors)
      TRIREME_CHECK(tensor.is_contiguous(), "a saved tensor lies in one piece: " + name);
  }
  copier_ = std::thread([this] { copy_all(); });
  writer_ = std::thread([this] { write_all(); });
}

BackgroundSave::~BackgroundSave() {
  cancel();
  copier_.join();
  writer_.join();
  for (const Piece& piece : pieces_) {
    if (piece.block != nullptr) pool_.release(piece.block);
  }
}

void BackgroundSave::cancel() {
  cancelled_.store(true);
  pool_.wake();
  { const std::lock_guard<std::mutex> lock(mutex_); }
  changed_.notify_all();
}

// The first error is the cause; both threads end soon.
void BackgroundSave::fail(std::exception_ptr error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  cancel();
}

void BackgroundSave::copy_all() {
  try {
    reader_.begin();
    for (size_t i = 0; i < work_.files.size() && !cancelled_.load(); ++i) copy_file(i);
  } catch (...) {
    fail(std::current_exception());
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    copied_ = true;
  }
  changed_.notify_all();
}

void BackgroundSave::copy_file(size_t index) {
  Piece piece;
  piece.file = index;
  const auto hand_over = [&] {
    if (piece.block != nullptr) reader_.finish();
    read_ += piece.bytes;
    push(piece);
    piece.block = nullptr;
    piece.bytes = 0;
  };
  try {
    for (const auto& [name, tensor] : work_.files[index].tensors) {
      const auto* from = static_cast<const uint8_t*>(tensor.const_data_ptr());
      for (int64_t at = 0, size = static_cast<int64_t>(tensor.nbytes()); at < size;) {
        if (piece.bytes == pool_.block_bytes()) hand_over();
        if (piece.block == nullptr) piece.block = pool_.acquire(cancelled_);
        if (piece.block == nullptr) return;
        const int64_t bytes = std::min(size - at, pool_.block_bytes() - piece.bytes);
        if (tensor.is_cpu())  // of a split model, gathered already
          std::memcpy(piece.block + piece.bytes, from + at, static_cast<size_t>(bytes));
        else
          reader_.read(piece.block + piece.bytes, from + at, bytes);
        piece.bytes += bytes;
        at += bytes;
      }
    }
    piece.last = true;
    hand_over();
    work_.files[index].tensors.clear();  // what was gathered for this file alone is free again
  } catch (...) {
    if (piece.block != nullptr) pool_.release(piece.block);
    throw;
  }
}

void BackgroundSave::push(const Piece& piece) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    pieces_.push_back(piece);
  }
  changed_.notify_all();
}

bool BackgroundSave::pop(Piece& piece) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return cancelled_.load() || copied_ || !pieces_.empty(); });
  if (cancelled_.load() || pieces_.empty()) return false;
  piece = pieces_.front();
  pieces_.pop_front();
  return true;
}

void BackgroundSave::write_all() {
  try {
    if (work_.prepare) work_.prepare();
    std::unique_ptr<ByteSink> sink;
    size_t done = 0;
    for (Piece piece; done < work_.files.size() && pop(piece);) {
      try {
        if (sink == nullptr) {
          sink = work_.open(work_.folder / work_.files[piece.file].name);
          const std::string& header = headers_[piece.file];
          sink->write(header.data(), header.size());
        }
        if (piece.block != nullptr) sink->write(piece.block, static_cast<size_t>(piece.bytes));
      } catch (...) {
        if (piece.block != nullptr) pool_.release(piece.block);
        throw;
      }
      if (piece.block != nullptr) pool_.release(piece.block);
      written_ += piece.bytes;
      if (piece.last) {
        sink->finish();
        sink = nullptr;
        ++done;
      }
      if (work_.written) work_.written();
    }
    // A reader that failed has left its error.
    if (done == work_.files.size() && !cancelled_.load()) work_.commit(cancelled_);
  } catch (...) {
    fail(std::current_exception());
  }
  std::exception_ptr error;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return copied_; });  // it ends soon: it is cancelled, or had nothing left to do
    error = error_;
  }
  if (error && work_.failed) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& what) {
      try {
        work_.failed(what);
      } catch (const std::exception&) {  // nobody is left to be told
      }
    } catch (...) {
    }
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    finished_ = true;
    end_ = SteadyClock::now();
  }
  changed_.notify_all();
}

bool BackgroundSave::copied() const { return wait_copied(Milliseconds(0)); }
bool BackgroundSave::finished() const { return wait_finished(Milliseconds(0)); }

bool BackgroundSave::wait_copied(Milliseconds time) const {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, time, [this] { return copied_; });
}

bool BackgroundSave::wait_finished(Milliseconds time) const {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, time, [this] { return finished_; });
}

std::exception_ptr BackgroundSave::error() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

bool BackgroundSave::failed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return finished_ && error_ != nullptr;
}

double BackgroundSave::seconds() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::chrono::duration<double>((finished_ ? end_ : SteadyClock::now()) - start_).count();
}

}  // namespace trireme
