// A micro-batch over context parallel ranks: which rows each computes, and whose keys its rows see.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "topology/context_split.h"
#include "trainer/ops/attention_runs.h"

namespace trireme {

class Model;
struct PackedBatch;

// One rank's part of a micro-batch that split_context has dealt. Rows of the whole micro-batch are called its rows, a
// rank's own ones are counted from 0 in their order there.
struct ContextRows {
  std::vector<int64_t> starts, prefix;  // the micro-batch's, as PackedBatch has them
  std::vector<int64_t> rows;            // the micro-batch's rows that are this rank's
  std::vector<int64_t> counts;          // rows of each rank
  // Of each row of the micro-batch: where it is when the ranks' rows come one after another.
  std::vector<int64_t> places;
  at::Tensor shared;                   // [s] int64, on the model's device: own rows whose keys other ranks need
  std::vector<int64_t> shared_counts;  // s of each rank
  // Over own rows; keys are the own ones and behind them the shared ones of all ranks.
  std::shared_ptr<const AttentionRuns> attention;

  // Whether any rank needs another's keys: alike on all.
  bool exchanges() const;
};

// How much of a micro-batch a rank computes.
struct OwnRows {
  int64_t rows = 0;
  int64_t shared = 0;  // rows of all context parallel ranks whose keys go to all: a layer keeps them on each
};
// What each is at most.
OwnRows at_most(const OwnRows& a, const OwnRows& b);
// Of rank `rank` of `ranks`, as context_part deals the rows.
OwnRows own_rows(const PackedBatch& whole, const ContextWork& work, int64_t ranks, int64_t rank);
// For this rank of the model; all rows where it is not split so.
OwnRows own_rows(const Model& model, const PackedBatch& whole);

// What rank `rank` of `ranks` computes of `whole`: its rows as a batch with `context`, empty where it has none. The
// same split on every rank. `device`: the model's; ids and positions stay on theirs.
PackedBatch context_part(const PackedBatch& whole, const ContextWork& work, int64_t ranks, int64_t rank,
                         at::Device device = at::kCPU);
// For this rank of the model; the batch as it is where the model is not split so.
PackedBatch context_part(const Model& model, const PackedBatch& whole);

}  // namespace trireme
