// JsonEvents: a look at a JSON text that keeps none of its values. nlohmann's own callback, called beside its parser,
// goes through all elements of the array or object around each object that ends: quadratic in what others send.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>

namespace trireme {

// For nlohmann::json::sax_parse. Goes on at everything; override what is to be seen. A text that is no JSON ends it
// without a word: the parser of the values says where.
class JsonEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool key(string_t&) override { return true; }
  bool start_object(size_t) override { return true; }
  bool start_array(size_t) override { return true; }
  bool end_object() override { return true; }
  bool end_array() override { return true; }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }
};

}  // namespace trireme
