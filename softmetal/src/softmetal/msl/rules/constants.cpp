// Function constants, section 5.8. The translator describes each in a softmetal_function_constant_info.
#include <map>

#include "rules.h"

namespace softmetal::rules {
namespace {
using namespace clang;

constexpr uint64_t kMostConstants = 65536;

class Constants : public Family {
 public:
  using Family::Family;

  void translated(const NamedDecl* declaration) override {
    const auto* info = dyn_cast<VarDecl>(declaration);
    StringRef name = declaration->getName();
    if (!info || !name.consume_front("softmetal_info_")) return;
    const APValue* value = info->evaluateValue();
    if (!value || !value->isStruct() || value->getStructNumFields() < 2 || !value->getStructField(1).isInt())
      return;
    const uint64_t index = value->getStructField(1).getInt().getZExtValue();
    if (index >= kMostConstants)
      program.refuse(info->getLocation(), "the index " + Twine(index) + " of function constant '" + name +
                                              "' is above 65535, the largest");
    const auto [other, is_new] = names_.emplace(index, name.str());
    if (!is_new)
      program.refuse(info->getLocation(), "function constants '" + other->second + "' and '" + name +
                                              "' have the same index " + Twine(index));
  }

 private:
  std::map<uint64_t, std::string> names_;
};

}  // namespace

std::unique_ptr<Family> constants(Program& program) { return std::make_unique<Constants>(program); }

}  // namespace softmetal::rules
