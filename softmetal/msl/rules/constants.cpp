// Constants.
#include "rules.h"

namespace softmetal::rules {
namespace {
using namespace clang;

class Constants : public Family {
 public:
  using Family::Family;
};

}  // namespace

std::unique_ptr<Family> constants(Program& program) { return std::make_unique<Constants>(program); }

}  // namespace softmetal::rules
