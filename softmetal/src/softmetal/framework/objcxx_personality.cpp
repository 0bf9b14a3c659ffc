// With the GNU Objective-C runtime clang gives every function of an Objective-C++ file the personality
// __gnu_objc_personality_v0, which does not understand typed C++ catch clauses. Code for Metal throws C++
// exceptions, so each shared object gets this hidden one, which calls C++'s. (@try/@catch of NSException is
// not supported.)
#include <unwind.h>

extern "C" _Unwind_Reason_Code __gxx_personality_v0(int, _Unwind_Action, _Unwind_Exception_Class,
                                                    _Unwind_Exception*, _Unwind_Context*);

extern "C" __attribute__((visibility("hidden"))) _Unwind_Reason_Code
__gnu_objc_personality_v0(int version, _Unwind_Action actions, _Unwind_Exception_Class exception_class,
                          _Unwind_Exception* exception, _Unwind_Context* context) {
  return __gxx_personality_v0(version, actions, exception_class, exception, context);
}
