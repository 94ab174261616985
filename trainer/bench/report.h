// What every benchmark takes and writes.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "trainer/bench/device.h"
#include "trainer/bench/shapes.h"
#include "trainer/parallel/context.h"

namespace trireme::bench {

struct CommonOptions {
  std::string shape;
  int64_t layers = 0;           // 0: all of the shape's
  std::string device = "auto";  // auto | cpu | cuda
  std::string dtype = "auto";   // auto: bfloat16 on cuda, float32 on cpu
  uint64_t seed = 1;
  int64_t repeats = 3;   // the median is quoted
  std::string json;      // file; empty: none
  std::string command;   // the command line, kept in the file
  bool verbose = false;  // logs what is chosen by trial
  int local_rank = 0;
  int64_t tp = 1;  // tensor parallel ranks of a replica
  int64_t cp = 1;  // context parallel ranks, which share each micro-batch
  int64_t pp = 1;  // pipeline stages
  int64_t ep = 1;  // ranks that share a layer's experts
  int64_t combine_blocks = 0;  // policy.moe_combine_blocks
  StageOptions stages;
  int64_t devices_of_replica() const { return tp * cp * pp; }
  Layout layout(int64_t ranks) const;  // of so many; throws Error(kUser) where they are no replicas
};

// The options resolved.
struct Target {
  ModelConfig config;
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  int64_t element_bytes = 4;
  StageOptions stages;
  int64_t combine_blocks = 0;

  ModelOptions model_options(bool trainable) const;
  // Of this rank's part of the model.
  ModelOptions model_options(bool trainable, ParallelContext& context) const;
};
Target resolve(const CommonOptions& options);  // throws Error(kUser)

// The fields common to all: benchmark, command, shape, layers, dtype, device, device_kind, date, versions, parameters,
// repeats.
nlohmann::json report_header(const std::string& benchmark, const CommonOptions& options, const Target& target);
// Pretty-printed and crash-safe; nothing when no file is wanted.
void write_report(const CommonOptions& options, const nlohmann::json& report);

// A table with a header line; columns as wide as their widest entry, all but the first right-aligned.
class Table final {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row);  // as many entries as the header
  void print(std::ostream& out) const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

std::string terabytes(double bytes_per_second);  // "4.280 TB/s"
std::string teraflops(double flops_per_second);  // "701.2 TFLOP/s"
std::string percent(double part, double whole);  // "91.4 %"; "-" when there is no whole

}  // namespace trireme::bench
