// Declarations.
#include "rules.h"

namespace softmetal::rules {
namespace {
using namespace clang;

class Declarations : public Family {
 public:
  using Family::Family;
};

}  // namespace

std::unique_ptr<Family> declarations(Program& program) { return std::make_unique<Declarations>(program); }

}  // namespace softmetal::rules
