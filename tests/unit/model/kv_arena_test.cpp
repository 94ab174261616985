#include <ATen/ATen.h>

#include "tests/unit/model/testing.h"
#include "trainer/model/kv_arena.h"

namespace trireme {
namespace {

TEST(KvArena, MoveAllIsOneMoveAfterAnother) {
  ModelConfig config;
  config.num_layers = 2;
  config.num_kv_heads = 1;
  config.head_dim = 4;
  KvArena arena(config, 12, at::kFloat, at::kCPU), expected(config, 12, at::kFloat, at::kCPU);
  for (KvArena* one : {&arena, &expected}) {
    for (int64_t layer = 0; layer < 2; ++layer) {
      one->keys(layer).copy_(at::arange(48, at::kFloat).view({12, 1, 4}) + 1000.0 * static_cast<double>(layer));
      one->values(layer).copy_(-one->keys(layer));
    }
  }
  // Row 6 is written, then read; the last move overlaps itself; empty moves and moves in place do nothing.
  const std::vector<RowMove> moves = {{0, 6, 2}, {6, 9, 1}, {3, 3, 4}, {0, 11, 0}, {1, 2, 4}};
  arena.move_all(moves);
  for (const RowMove& move : moves) expected.move(move.from, move.to, move.rows);
  for (int64_t layer = 0; layer < 2; ++layer) {
    EXPECT_TRUE(at::equal(arena.keys(layer), expected.keys(layer)));
    EXPECT_TRUE(at::equal(arena.values(layer), expected.values(layer)));
    EXPECT_EQ(arena.keys(layer)[9][0][0].item<double>(), 1000.0 * static_cast<double>(layer));
  }
  EXPECT_THROW(arena.move_all({{0, 11, 2}}), Error);
}

TEST(KvArena, ComesBackWithAnotherNumberOfRows) {
  ModelConfig config;
  config.num_layers = 2;
  config.num_kv_heads = 1;
  config.head_dim = 4;
  KvArena arena(config, 5, at::kFloat, at::kCPU, /*most_rows=*/9);
  arena.keys(1).fill_(3);
  EXPECT_THROW(arena.restore(5), Error);  // it has its memory
  for (const int64_t rows : {9, 2}) {
    arena.release();
    EXPECT_FALSE(arena.resident());
    arena.restore(rows);
    EXPECT_TRUE(arena.resident());
    EXPECT_EQ(arena.rows(), rows);
    EXPECT_EQ(arena.values(1).size(0), rows);
    EXPECT_TRUE(at::equal(arena.keys(1), at::zeros({rows, 1, 4})));
    EXPECT_THROW(arena.move(0, 1, rows), Error);
  }
  arena.release();
  EXPECT_THROW(arena.restore(10), Error);
}

}  // namespace
}  // namespace trireme
