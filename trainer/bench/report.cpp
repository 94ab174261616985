#include "trainer/bench/report.h"

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"
#include "topology/combine_blocks.h"
#include "trainer/parallel/device.h"

namespace trireme::bench {

ModelOptions Target::model_options(bool trainable) const {
  ModelOptions options;
  options.dtype = dtype;
  options.device = device;
  options.trainable = trainable;
  options.combine_blocks = combine_blocks;
  return options;
}

ModelOptions Target::model_options(bool trainable, ParallelContext& context) const {
  ModelOptions options = model_options(trainable);
  const ModelShape shape = config.shape();
  if (context.holders().size() > 1) {
    const LayoutReport report = check_layout(context.layout(), {.shape = &shape});
    if (!report.ok()) fail_user(report.errors.front());
    if (const auto problem = stage_error(config.num_layers, context.layout().pp, stages)) fail_user(*problem);
  }
  set_split(options, shape, context, stages);
  return options;
}

Layout CommonOptions::layout(int64_t ranks) const {
  if (ranks % devices_of_replica() != 0) {
    fail_user("--tp " + std::to_string(tp) + " times --cp " + std::to_string(cp) + " times --pp " + std::to_string(pp) +
              " does not divide the " + std::to_string(ranks) + " ranks");
  }
  return {.tp = tp, .cp = cp, .ep = ep, .dp = ranks / devices_of_replica(), .pp = pp};
}

Target resolve(const CommonOptions& options) {
  if (options.repeats < 1) fail_user("--repeats must be at least 1");
  Target target;
  target.config = find_shape(options.shape, options.layers);
  target.device = choose_device(options.device, options.local_rank);
  target.dtype = options.dtype != "auto"   ? parse_dtype(options.dtype)
                 : target.device.is_cuda() ? at::kBFloat16
                                           : at::kFloat;
  target.stages = options.stages;
  target.combine_blocks = options.combine_blocks;
  if (options.combine_blocks > 0 && target.config.num_experts == 0)
    fail_user("--combine-blocks " + std::to_string(options.combine_blocks) + ": the shape " + options.shape +
              " has no experts");
  if (target.config.num_experts > 0) {
    for (const std::string& problem :
         combine_block_problems(target.config.num_experts, options.combine_blocks, options.ep))
      fail_user(problem);
  }
  target.element_bytes = static_cast<int64_t>(c10::elementSize(target.dtype));
  return target;
}

nlohmann::json report_header(const std::string& benchmark, const CommonOptions& options, const Target& target) {
  return {{"benchmark", benchmark},
          {"command", options.command},
          {"shape", to_lower(options.shape)},
          {"layers", target.config.num_layers},
          {"parameters", target.config.parameter_count()},
          {"dtype", dtype_name(target.dtype)},
          {"device", machine_name(target.device)},
          {"device_kind", target.device.is_cuda() ? "cuda" : "cpu"},
          {"seed", options.seed},
          {"tp", options.tp},
          {"cp", options.cp},
          {"pp", options.pp},
          {"ep", options.ep},
          {"combine_blocks", options.combine_blocks},
          {"virtual_stages", options.stages.virtual_stages},
          {"first_stage_layers", options.stages.first_layers},
          {"last_stage_layers", options.stages.last_layers},
          {"repeats", options.repeats},
          {"date", utc_now()},
          {"versions", versions(target.device)}};
}

void write_report(const CommonOptions& options, const nlohmann::json& report) {
  if (!options.json.empty()) write_file_atomic(options.json, report.dump(2) + "\n");
}

void Table::add(std::vector<std::string> row) {
  TRIREME_CHECK(row.size() == rows_.front().size(), "a table's row has another number of entries than its header");
  rows_.push_back(std::move(row));
}

void Table::print(std::ostream& out) const {
  std::vector<size_t> widths(rows_.front().size(), 0);
  for (const auto& row : rows_) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  for (const auto& row : rows_) {
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string blanks(widths[c] - row[c].size(), ' ');
      out << (c == 0 ? row[c] + blanks : "  " + blanks + row[c]);
    }
    out << "\n";
  }
}

std::string terabytes(double bytes_per_second) { return format_fixed(bytes_per_second / 1e12, 3) + " TB/s"; }
std::string teraflops(double flops_per_second) { return format_fixed(flops_per_second / 1e12, 1) + " TFLOP/s"; }
std::string percent(double part, double whole) {
  return whole > 0 ? format_fixed(100 * part / whole, 1) + " %" : std::string("-");
}

}  // namespace trireme::bench
