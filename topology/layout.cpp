// Text form and validity of a layout.
#include <algorithm>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "base/text.h"
#include "topology/topology.h"

namespace trireme {
namespace {

// Larger sizes than these are mistakes; the bounds also keep every product inside 64 bits.
constexpr int64_t kMaxSize = 1 << 16;
constexpr int64_t kMaxWorld = 1 << 20;

struct Field {
  const char* name;
  int64_t Layout::*member;
};
constexpr Field kFields[] = {{"tp", &Layout::tp}, {"cp", &Layout::cp}, {"ep", &Layout::ep},
                             {"dp", &Layout::dp}, {"pp", &Layout::pp}, {"etp", &Layout::etp}};

std::string list(const std::vector<int64_t>& values) {
  std::vector<std::string> texts;
  for (const int64_t value : values) texts.push_back(std::to_string(value));
  return texts.empty() ? "none" : join(texts, ", ");
}

// Divisors of the first number that divide all the others; zeros do not constrain.
std::vector<int64_t> common_divisors(std::initializer_list<int64_t> numbers) {
  int64_t gcd = 0;
  for (const int64_t number : numbers) gcd = gcd == 0 ? number : (number == 0 ? gcd : std::gcd(gcd, number));
  return divisors(std::max<int64_t>(gcd, 1));
}

// The values each axis may take by itself, whatever the others are.
struct LegalValues {
  std::vector<int64_t> tp, cp, ep, pp, etp;
};

LegalValues legal_values(int64_t world, int64_t node, const ModelShape* shape, const StageOptions& stages) {
  const ModelShape none;
  const ModelShape& model = shape ? *shape : none;
  LegalValues legal;
  legal.tp = common_divisors({world, node, model.heads, model.kv_heads, model.intermediate});
  legal.cp = divisors(world);
  legal.pp = divisors(world);
  if (model.layers > 0) std::erase_if(legal.pp, [&](int64_t pp) { return !stages_fit(model.layers, pp, stages); });
  legal.ep = shape && model.experts == 0 ? std::vector<int64_t>{1} : common_divisors({world, model.experts});
  legal.etp =
      shape && model.experts == 0 ? std::vector<int64_t>{1} : common_divisors({world, node, model.moe_intermediate});
  return legal;
}

void check_one(const char* axis, int64_t size, int64_t of, const std::string& what, const std::vector<int64_t>& legal,
               std::vector<std::string>& errors) {
  if (of == 0 || of % size == 0) return;
  errors.push_back(std::string(axis) + " " + std::to_string(size) + " does not divide the " + std::to_string(of) + " " +
                   what + "; legal values of " + axis + " here: " + list(legal));
}

int64_t saturating_product(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? std::numeric_limits<int64_t>::max() : result;
}

// Adds to `problems` where the sizes of a grid, each beside the values that it may have, do not divide the ranks.
void check_product(const Layout& layout, const std::vector<std::pair<Field, std::vector<int64_t>>>& axes, int64_t world,
                   std::vector<ProductProblem>& problems) {
  ProductProblem problem;
  for (const auto& [field, legal] : axes) {
    const int64_t size = layout.*field.member;
    problem.product = saturating_product(problem.product, size);
    problem.sizes.push_back({field.name, size, {}});
  }
  if (world % problem.product == 0) return;
  for (size_t i = 0; i < axes.size(); ++i) {
    int64_t others = 1;
    for (size_t j = 0; j < axes.size(); ++j)
      if (j != i) others = saturating_product(others, problem.sizes[j].size);
    for (const int64_t value : axes[i].second)
      if (world % saturating_product(others, value) == 0) problem.sizes[i].legal.push_back(value);
  }
  problem.ranks = std::to_string(world) + " ranks";
  if (world <= kMaxWorld) problem.legal = divisors(world);
  problems.push_back(std::move(problem));
}

std::vector<ProductProblem> find_product_problems(const Layout& layout, int64_t world, const LegalValues& legal) {
  const Field tp{"tp", &Layout::tp}, cp{"cp", &Layout::cp}, pp{"pp", &Layout::pp}, ep{"ep", &Layout::ep},
      etp{"etp", &Layout::etp};
  std::vector<ProductProblem> problems;
  check_product(layout, {{tp, legal.tp}, {cp, legal.cp}, {pp, legal.pp}}, world, problems);
  if (layout.ep > 1 || layout.etp > 1)
    check_product(layout, {{etp, legal.etp}, {ep, legal.ep}, {pp, legal.pp}}, world, problems);
  return problems;
}

int64_t node_of(int64_t gpus_per_node, int64_t world) {
  return gpus_per_node > 0 ? std::min(gpus_per_node, world) : world;
}

}  // namespace

std::string to_string(const Layout& layout) {
  std::vector<std::string> parts;
  for (const Field& field : kFields)
    parts.push_back(std::string(field.name) + "=" + std::to_string(layout.*field.member));
  return join(parts, ",");
}

Layout parse_layout(std::string_view text) {
  Layout layout;
  std::vector<std::string> names;
  for (const Field& field : kFields) names.push_back(field.name);
  for (const std::string& part : split(text, ',')) {
    if (trim(part).empty()) continue;
    const size_t equals = part.find('=');
    const std::string name{trim(std::string_view(part).substr(0, equals))};
    const auto field =
        std::find_if(std::begin(kFields), std::end(kFields), [&](const Field& f) { return f.name == name; });
    if (field == std::end(kFields)) {
      fail_user("layout \"" + std::string(text) + "\": unknown size \"" + name + "\"; known: " + join(names, ", "));
    }
    const auto value =
        equals == std::string::npos ? std::nullopt : parse_int(trim(std::string_view(part).substr(equals + 1)));
    if (!value || *value < 1 || *value > kMaxSize) {
      fail_user("layout \"" + std::string(text) + "\": " + name + " must be a number from 1 to " +
                std::to_string(kMaxSize));
    }
    layout.*(field->member) = *value;
  }
  return layout;
}

std::string to_string(const ProductProblem& problem) {
  std::vector<std::string> factors, hints;
  for (const ProductProblem::Size& size : problem.sizes) {
    factors.push_back(size.name + " " + std::to_string(size.size));
    if (!size.legal.empty()) hints.push_back(size.name + " can be " + list(size.legal));
  }
  const bool alone = factors.size() == 1;
  std::string text = join(factors, " x ") + (alone ? "" : " = " + std::to_string(problem.product)) +
                     " does not divide the " + problem.ranks;
  if (!hints.empty()) return text + (alone ? "; " : "; with the others as they are, ") + join(hints, ", or ");
  return problem.legal.empty() ? text : text + "; the product can be " + list(problem.legal);
}

std::vector<ProductProblem> product_problems(const Layout& layout, int64_t world, int64_t gpus_per_node) {
  LegalValues legal;
  if (world <= kMaxWorld) legal = legal_values(world, node_of(gpus_per_node, world), nullptr, {});
  return find_product_problems(layout, world, legal);
}

std::vector<int64_t> divisors(int64_t number) {
  std::vector<int64_t> low, high;
  for (int64_t d = 1; d * d <= number; ++d) {
    if (number % d != 0) continue;
    low.push_back(d);
    if (d != number / d) high.push_back(number / d);
  }
  low.insert(low.end(), high.rbegin(), high.rend());
  return low;
}

std::optional<int64_t> derive_dp(const Layout& layout, int64_t world) {
  int64_t product = 1;
  for (const int64_t size : {layout.tp, layout.cp, layout.pp}) {
    if (size < 1 || size > kMaxSize || world < 1 || world > kMaxWorld) return std::nullopt;
    product *= size;
  }
  if (world % product != 0) return std::nullopt;
  return world / product;
}

LayoutReport check_layout(const Layout& layout, const LayoutCheck& check) {
  LayoutReport report;
  for (const Field& field : kFields) {
    const int64_t size = layout.*field.member;
    if (size < 1 || size > kMaxSize) {
      report.errors.push_back(std::string(field.name) + " is " + std::to_string(size) + "; it must be from 1 to " +
                              std::to_string(kMaxSize));
    }
  }
  if (!report.ok()) return report;

  // Each size is at most 2^16, so three of them stay inside 64 bits; the fourth is only multiplied after this bound.
  const int64_t model_parallel = layout.tp * layout.cp * layout.pp;
  const int64_t expert_parallel = layout.etp * layout.ep * layout.pp;
  if (model_parallel > kMaxWorld || expert_parallel > kMaxWorld || model_parallel * layout.dp > kMaxWorld ||
      check.world > kMaxWorld || check.world < 0) {
    report.errors.push_back("more than " + std::to_string(kMaxWorld) + " ranks");
    return report;
  }
  const int64_t world = check.world > 0 ? check.world : layout.world();
  const int64_t node = node_of(check.gpus_per_node, world);
  const ModelShape none;
  const ModelShape& model = check.shape ? *check.shape : none;
  const LegalValues legal = legal_values(world, node, check.shape, check.stages);
  std::vector<std::string>& errors = report.errors;

  check_one("tp", layout.tp, node, "GPUs of a node (tensor parallel ranks must share a node)", legal.tp, errors);
  check_one("tp", layout.tp, model.heads, "attention heads", legal.tp, errors);
  check_one("tp", layout.tp, model.kv_heads, "key/value heads", legal.tp, errors);
  check_one("tp", layout.tp, model.intermediate, "rows of the MLP", legal.tp, errors);
  if (check.stages == StageOptions{}) {
    check_one("pp", layout.pp, model.layers, "layers", legal.pp, errors);
  } else if (model.layers > 0) {
    if (const auto error = stage_error(model.layers, layout.pp, check.stages, check.stage_section))
      errors.push_back(*error);
  }
  if (check.shape && model.experts == 0) {
    if (layout.ep > 1)
      errors.push_back("ep " + std::to_string(layout.ep) + " for a model without experts; ep must be 1");
    if (layout.etp > 1)
      errors.push_back("etp " + std::to_string(layout.etp) + " for a model without experts; etp must be 1");
  } else {
    check_one("ep", layout.ep, model.experts, "experts", legal.ep, errors);
    check_one("etp", layout.etp, node, "GPUs of a node (expert tensor parallel ranks must share a node)", legal.etp,
              errors);
    check_one("etp", layout.etp, model.moe_intermediate, "rows of an expert", legal.etp, errors);
  }
  for (const ProductProblem& problem : find_product_problems(layout, world, legal))
    errors.push_back(to_string(problem));
  if (errors.empty() && model_parallel * layout.dp != world) {
    errors.push_back("dp " + std::to_string(layout.dp) + " gives " + std::to_string(layout.world()) + " ranks, not " +
                     std::to_string(world) + "; dp must be " + std::to_string(world / model_parallel));
  }
  if (!errors.empty()) return report;

  Layout full = layout;
  full.dp = world / model_parallel;
  if (layout.cp > 1 && !inside_node(full, Axis::kTpCp, node)) {
    report.warnings.push_back("tp " + std::to_string(layout.tp) + " x cp " + std::to_string(layout.cp) +
                              " spans nodes of " + std::to_string(node) +
                              " GPUs: keys and values then travel over the network in every layer");
  }
  if (layout.ep > 1 && !inside_node(full, Axis::kEtpEp, node)) {
    report.warnings.push_back("etp " + std::to_string(layout.etp) + " x ep " + std::to_string(layout.ep) +
                              " spans nodes of " + std::to_string(node) +
                              " GPUs: tokens then travel over the network in every expert layer");
  }
  return report;
}

std::vector<Layout> legal_layouts(const LayoutCheck& check, int64_t etp) {
  std::vector<Layout> found;
  if (check.world < 1 || check.world > kMaxWorld || etp < 1 || etp > kMaxSize) return found;
  const int64_t node = node_of(check.gpus_per_node, check.world);
  LegalValues legal = legal_values(check.world, node, check.shape, check.stages);
  if (!check.shape || check.shape->experts == 0) legal.ep = {1};
  for (const int64_t tp : legal.tp) {
    for (const int64_t cp : legal.cp) {
      for (const int64_t pp : legal.pp) {
        for (const int64_t ep : legal.ep) {
          Layout layout{.tp = tp, .cp = cp, .ep = ep, .pp = pp, .etp = etp};
          const auto dp = derive_dp(layout, check.world);
          if (!dp || check.world % (etp * ep * pp) != 0) continue;
          layout.dp = *dp;
          if (check_layout(layout, check).ok()) found.push_back(layout);
        }
      }
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const Layout& a, const Layout& b) {
    return a.tp * a.cp * a.pp != b.tp * b.cp * b.pp ? a.tp * a.cp * a.pp < b.tp * b.cp * b.pp : a.ep < b.ep;
  });
  return found;
}

}  // namespace trireme
