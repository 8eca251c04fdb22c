#ifndef SHARDD_TESTS_E2E_RANKS_ARGS_H_
#define SHARDD_TESTS_E2E_RANKS_ARGS_H_

// What a run is made of, as text, because ranks are processes: `{{"steps", "50"}, {"optimizer", "sgd"}}`.

#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>

namespace shardd::e2e {

class Args {
 public:
  Args() = default;
  Args(std::initializer_list<std::pair<const std::string, std::string>> values) : values_(values) {}
  static Args Parse(int argc, char** argv, int first) {
    Args args;
    for (int i = first; i < argc; ++i) {
      const std::string text = argv[i];
      const size_t at = text.find('=');
      args.values_[text.substr(0, at)] = at == std::string::npos ? "" : text.substr(at + 1);
    }
    return args;
  }
  // These values, and those of `other` in their place where both have one.
  Args With(const Args& other) const {
    Args result = other;
    result.values_.insert(values_.begin(), values_.end());
    return result;
  }
  std::string Text(const std::string& name, const std::string& otherwise = "") const {
    const auto found = values_.find(name);
    return found == values_.end() ? otherwise : found->second;
  }
  int Int(const std::string& name, int otherwise = 0) const {
    const std::string text = Text(name);
    return text.empty() ? otherwise : std::atoi(text.c_str());
  }
  double Double(const std::string& name, double otherwise = 0) const {
    const std::string text = Text(name);
    return text.empty() ? otherwise : std::atof(text.c_str());
  }
  const std::map<std::string, std::string>& values() const { return values_; }

 private:
  std::map<std::string, std::string> values_;
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RANKS_ARGS_H_
