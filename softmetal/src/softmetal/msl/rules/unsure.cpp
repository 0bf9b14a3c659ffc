// Constructs that appear in no public Metal source, so Apple's compiler may refuse them. They are refused on
// request (../compile.py), for code that was never compiled on a Mac.
#include "rules.h"

namespace softmetal::rules {
namespace {
using namespace clang;

// The expression without the copies and conversions around it.
const Expr* source_of(const Expr* e) {
  for (;;) {
    const Expr* inner = e->IgnoreParenImpCasts();
    if (const auto* cleanups = dyn_cast<ExprWithCleanups>(inner)) inner = cleanups->getSubExpr();
    if (const auto* temporary = dyn_cast<MaterializeTemporaryExpr>(inner)) inner = temporary->getSubExpr();
    if (const auto* bound = dyn_cast<CXXBindTemporaryExpr>(inner)) inner = bound->getSubExpr();
    // A cast of the translator, on arms of conditional expressions that name objects.
    if (const auto* cast = dyn_cast<CXXStaticCastExpr>(inner)) inner = cast->getSubExpr();
    if (const auto* copy = dyn_cast<CXXConstructExpr>(inner);
        copy && copy->getNumArgs() == 1 && copy->getConstructor()->isCopyOrMoveConstructor())
      inner = copy->getArg(0);
    if (inner == e) return e;
    e = inner;
  }
}

bool is_temporary(const Expr* e) { return !e->isTypeDependent() && !source_of(e)->isLValue(); }

class Unsure : public Family {
 public:
  using Family::Family;

  void statement(const Stmt* statement) override {
    if (!program.refuses_unsure) return;
    if (const auto* conditional = dyn_cast<ConditionalOperator>(statement)) check_arms(conditional);
    if (const auto* call = dyn_cast<CallExpr>(statement)) check_call(call);
    if (const auto* construct = dyn_cast<CXXConstructExpr>(statement);
        construct && !construct->getConstructor()->isCopyOrMoveConstructor())
      check_arguments(construct->getConstructor(), construct->arguments());
  }

 private:
  void doubt(SourceLocation place, const Twine& construct, const Twine& instead) {
    program.refuse(
        place, construct + " is in no public Metal source, and Apple's compiler may refuse it: " + instead);
  }

  void check_arms(const ConditionalOperator* conditional) {
    if (conditional->isTypeDependent() || !conditional->getType()->isRecordType()) return;
    const Expr* first = source_of(conditional->getTrueExpr());
    const Expr* second = source_of(conditional->getFalseExpr());
    if (isa<CXXThrowExpr>(first) || isa<CXXThrowExpr>(second)) return;
    if (first->isLValue() != second->isLValue())
      doubt(conditional->getQuestionLoc(),
            "a conditional operator between a named object and a temporary of type '" +
                spelled(program, conditional->getType().getUnqualifiedType()) + "'",
            "write if and else");
    else if (first->isLValue() && first->getType().getCanonicalType() != second->getType().getCanonicalType())
      doubt(conditional->getQuestionLoc(),
            "a conditional operator between objects of types '" + spelled(program, first->getType()) +
                "' and '" + spelled(program, second->getType()) + "'",
            "write if and else");
  }

  void check_call(const CallExpr* call) {
    const FunctionDecl* callee = call->getDirectCallee();
    if (!callee || program.is_library(callee)) return;
    unsigned first = 0;
    const auto* method = dyn_cast<CXXMethodDecl>(callee);
    if (isa<CXXOperatorCallExpr>(call) && method && !method->isStatic()) first = 1;
    const auto* member_call = dyn_cast<CXXMemberCallExpr>(call);
    // Public sources call operators on temporaries: `Op()(x)`.
    if (member_call && method && !method->isOverloadedOperator() && !isa<CXXConversionDecl>(method) &&
        !annotations(method, "this").empty() && is_temporary(member_call->getImplicitObjectArgument()) &&
        !member_call->getImplicitObjectArgument()->getType()->isPointerType())
      doubt(member_call->getExprLoc(),
            "a call of the member function '" + method->getNameAsString() +
                "', which is qualified with an address space, on a temporary",
            "name the temporary");
    check_arguments(callee, llvm::ArrayRef(call->getArgs(), call->getNumArgs()).drop_front(first));
  }

  template <typename Arguments>
  void check_arguments(const FunctionDecl* callee, const Arguments& arguments) {
    if (program.is_library(callee)) return;
    unsigned i = 0;
    for (const Expr* argument : arguments) {
      if (i >= callee->getNumParams()) return;
      const ParmVarDecl* parameter = callee->getParamDecl(i++);
      if (isa<CXXDefaultArgExpr>(argument)) continue;
      const QualType type = parameter->getType();
      if (type->isLValueReferenceType() && type->getPointeeType()->isRecordType() && is_temporary(argument))
        doubt(argument->getBeginLoc(),
              "a reference (parameter '" + parameter->getNameAsString() + "' of '" +
                  callee->getNameAsString() + "') to a temporary object",
              "name the temporary");
    }
  }
};

}  // namespace

std::unique_ptr<Family> unsure(Program& program) { return std::make_unique<Unsure>(program); }

}  // namespace softmetal::rules
