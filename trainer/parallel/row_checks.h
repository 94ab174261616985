// Start-up self-tests of what expert and context groups exchange. Of the tensor group: exchange_problem; of a
// pipeline's stages: StageLinks::problem.
//
// Every rank knows what each row of every rank holds, and makes what it should get by itself: nothing of the expected
// rows has travelled, and sums are taken in float64 and rounded to float32 after each addition. Compared are bytes.
// Rows are few and uneven, none on some ranks, and as many as make about 256 KiB; for a moment each rank holds some 30
// times that.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trainer/parallel/dispatch.h"
#include "trainer/parallel/exchange.h"

namespace trireme {

// The exchanges that are judged. A test of a self-test puts a wrong one in the place of one.
struct ExpertExchanges {
  using Many = std::vector<at::Tensor> (*)(Communicator&, const Dispatch&, const std::vector<at::Tensor>&);
  using Even = at::Tensor (*)(Communicator&, const at::Tensor&);
  Many dispatch = dispatch_rows, give_back = return_rows;
  at::Tensor (*add)(const Dispatch&, const at::Tensor&, int64_t) = add_returned;
  Even gather = gather_rows, whole = whole_rows;
};
struct ContextExchanges {
  using Uneven = at::Tensor (*)(Communicator&, const at::Tensor&, const std::vector<int64_t>&);
  Uneven gather = gather_rows, share = share_rows;
};

// Whether rows of `width` elements arrive as they were sent, where they should, and come back and are added so: of a
// group that shares the experts of a mixture. `decodes`: also what decode steps exchange, which may go over the
// devices' memory (PeerExchange, made here where the group has none yet); else the group's communicator carries all.
// One sentence that names rank, group, exchange and sizes; nothing where all is right. Collective; all ranks get the
// same answer.
std::optional<std::string> expert_exchange_problem(Communicator& group, int64_t width, const at::TensorOptions& options,
                                                   bool decodes, const ExpertExchanges& exchanges = {});

// The same of a context group, where each rank has another number of rows. The communicator carries them and adds
// nothing on the way forward. Backward sums in the order of ranks.
std::optional<std::string> context_exchange_problem(Communicator& group, int64_t width,
                                                    const at::TensorOptions& options,
                                                    const ContextExchanges& exchanges = {});

}  // namespace trireme
