#include "trainer/rewards/answer_matrix.h"

#include <algorithm>
#include <utility>

#include "trainer/rewards/answer_nodes.h"

namespace trireme {
namespace {

constexpr size_t kMaxNodes = 4000;  // of a computed matrix: each product multiplies its entries

size_t node_count(const Node& node) {
  size_t count = 1;
  for (const NodePtr& child : node.children) count += node_count(*child);
  return count;
}

bool is_matrix(const NodePtr& node) { return node->kind == NodeKind::kMatrix; }

// Rows of the same length, with expressions for entries.
bool is_rectangular(const Node& m) {
  return !m.children.empty() && std::all_of(m.children.begin(), m.children.end(), [&](const NodePtr& row) {
    return row->children.size() == m.children[0]->children.size() &&
           std::all_of(row->children.begin(), row->children.end(),
                       [](const NodePtr& entry) { return entry->kind <= NodeKind::kPercent && entry->unit.empty(); });
  });
}

NodePtr signed_sum(std::vector<NodePtr> terms, std::vector<uint8_t> flags) {
  auto sum = make(NodeKind::kSum);
  sum->children = std::move(terms);
  sum->flags = std::move(flags);
  return sum;
}

NodePtr matrix_sum(const Node& sum) {
  const Node& first = *sum.children[0];
  const size_t rows = first.children.size(), columns = first.children[0]->children.size();
  for (size_t k = 0; k < sum.children.size(); ++k) {
    const Node& m = *sum.children[k];
    if (m.kind != NodeKind::kMatrix || sum.flags[k] >= kEitherSign || !is_rectangular(m) || m.children.size() != rows ||
        m.children[0]->children.size() != columns) {
      return nullptr;
    }
  }
  auto total = make(NodeKind::kMatrix);
  for (size_t r = 0; r < rows; ++r) {
    auto row = make(NodeKind::kList);
    for (size_t c = 0; c < columns; ++c) {
      std::vector<NodePtr> terms;
      for (const NodePtr& m : sum.children) terms.push_back(copy(*m->children[r]->children[c]));
      row->children.push_back(signed_sum(std::move(terms), sum.flags));
    }
    total->children.push_back(std::move(row));
  }
  return total;
}

NodePtr scalar_times(const Node& scalar, bool divides, const Node& m) {
  auto scaled = make(NodeKind::kMatrix);
  for (const NodePtr& row : m.children) {
    auto line = make(NodeKind::kList);
    for (const NodePtr& entry : row->children) {
      auto product = make(NodeKind::kProduct, copy(*entry), copy(scalar));
      product->flags = {kPlain, divides ? kInverse : kPlain};
      line->children.push_back(std::move(product));
    }
    scaled->children.push_back(std::move(line));
  }
  return scaled;
}

NodePtr matrix_times(const Node& a, const Node& b) {
  const size_t inner = b.children.size();
  if (a.children[0]->children.size() != inner) return nullptr;
  auto product = make(NodeKind::kMatrix);
  for (const NodePtr& row : a.children) {
    auto line = make(NodeKind::kList);
    for (size_t c = 0; c < b.children[0]->children.size(); ++c) {
      std::vector<NodePtr> terms;
      for (size_t k = 0; k < inner; ++k) {
        auto term = make(NodeKind::kProduct, copy(*row->children[k]), copy(*b.children[k]->children[c]));
        term->flags = {kPlain, kPlain};
        terms.push_back(std::move(term));
      }
      line->children.push_back(signed_sum(std::move(terms), std::vector<uint8_t>(inner, kPlain)));
    }
    product->children.push_back(std::move(line));
  }
  return product;
}

NodePtr matrix_product(const Node& product) {
  NodePtr total;
  for (size_t k = 0; k < product.children.size(); ++k) {
    const Node& factor = *product.children[k];
    if (factor.kind != NodeKind::kMatrix) continue;
    if (product.flags[k] != kPlain || !is_rectangular(factor)) return nullptr;
    if (total && node_count(*total) * factor.children.size() > kMaxNodes) return nullptr;
    total = total ? matrix_times(*total, factor) : copy(factor);
    if (!total || node_count(*total) > kMaxNodes) return nullptr;
  }
  for (size_t k = 0; k < product.children.size(); ++k) {
    const Node& factor = *product.children[k];
    if (factor.kind == NodeKind::kMatrix) continue;
    if (factor.kind > NodeKind::kPercent) return nullptr;
    total = scalar_times(factor, product.flags[k] == kInverse, *total);
    if (node_count(*total) > kMaxNodes) return nullptr;
  }
  return total;
}

}  // namespace

NodePtr with_matrices_computed(NodePtr node) {
  if (std::none_of(node->children.begin(), node->children.end(), is_matrix)) return node;
  if (node_count(*node) > kMaxNodes) return nullptr;
  return node->kind == NodeKind::kSum ? (is_matrix(node->children[0]) ? matrix_sum(*node) : nullptr)
                                      : matrix_product(*node);
}

}  // namespace trireme
