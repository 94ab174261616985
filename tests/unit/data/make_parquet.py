#!/usr/bin/env python3
"""Writes the Parquet files of dataset_test.cpp beside itself (needs pyarrow). They are checked in; run it to change
them."""
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

HERE = pathlib.Path(__file__).resolve().parent
ROWS = 10
table = pa.table({
    "problem": [f"What is {i} + {i}? ü{i}" for i in range(ROWS)],
    "answer": [str(2 * i) for i in range(ROWS)],
    "level": pa.array(range(ROWS), pa.int32()),
    "weight": pa.array([i / 4 for i in range(ROWS)], pa.float64()),
    "hard": [i % 2 == 1 for i in range(ROWS)],
    "tags": [["a", f"t{i}"] if i != 3 else None for i in range(ROWS)],
    "source": [{"name": "made", "page": i} for i in range(ROWS)],
})
pq.write_table(table, HERE / "numbers_snappy.parquet", row_group_size=4, compression="snappy")
pq.write_table(table.select(["problem", "answer"]), HERE / "numbers_gzip.parquet", compression="gzip")
pq.write_table(table.select(["problem", "answer"]), HERE / "numbers_lz4.parquet", compression="lz4",
               use_dictionary=False)
pq.write_table(table.select(["problem", "answer"]), HERE / "numbers_zstd.parquet", compression="zstd")
chats = pa.table({"messages": [[{"role": "user", "content": f"question {i}"},
                                {"role": "assistant", "content": f"answer {i}"}] for i in range(3)]})
pq.write_table(chats, HERE / "chats.parquet", compression="none")
