// Conversions between scalars and vectors, section 2. clang's options forbid most of them (diagnostics.py).
#include "rules.h"

namespace softmetal::rules {
namespace {
using namespace clang;

QualType element_of(QualType type) {
  const auto* vector = type->getAs<VectorType>();
  return (vector ? vector->getElementType() : type).getCanonicalType().getUnqualifiedType();
}

class Conversions : public Family {
 public:
  using Family::Family;

  void statement(const Stmt* statement) override {
    if (const auto* call = dyn_cast<CallExpr>(statement)) allow_literals(call);
    if (const auto* cast = dyn_cast<ImplicitCastExpr>(statement)) check_conversion(cast);
  }

 private:
  std::set<const Expr*> allowed_;  // string literals

  // Calls that the translator adds pass names as string literals.
  void allow_literals(const CallExpr* call) {
    const FunctionDecl* callee = call->getDirectCallee();
    if (!callee || !program.is_library(callee)) return;
    for (const Expr* argument : call->arguments()) allowed_.insert(argument->IgnoreParenImpCasts());
  }

  void check_conversion(const ImplicitCastExpr* cast) {
    if (cast->isPartOfExplicitCast()) return;
    const QualType from = cast->getSubExpr()->getType(), to = cast->getType();
    switch (cast->getCastKind()) {
      case CK_FloatingCast:
        if (element_of(to)->isBFloat16Type() && !element_of(from)->isBFloat16Type())
          program.refuse(
              cast->getBeginLoc(),
              "'" + spelled(program, from) + "' does not convert to bfloat implicitly: write bfloat(...)");
        break;
      case CK_ArrayToPointerDecay:
        if (const Expr* literal = cast->getSubExpr()->IgnoreParens();
            isa<StringLiteral>(literal) && !allowed_.count(literal))
          program.refuse(cast->getBeginLoc(),
                         "a string literal is in constant memory, and the pointer is to thread memory");
        break;
      default:
        break;
    }
  }
};

}  // namespace

std::unique_ptr<Family> conversions(Program& program) { return std::make_unique<Conversions>(program); }

}  // namespace softmetal::rules
