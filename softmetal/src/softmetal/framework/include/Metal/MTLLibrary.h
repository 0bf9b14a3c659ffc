// Source, compile options, function constants and functions. (Instance variables are softmetal's: the GNU
// Objective-C runtime requires them in the header.)
#pragma once
#import <Metal/MTLTypes.h>

extern NSString* const MTLLibraryErrorDomain;

typedef NS_ENUM(NSUInteger, MTLLibraryError) {
  MTLLibraryErrorUnsupported = 1,
  MTLLibraryErrorInternal = 2,
  MTLLibraryErrorCompileFailure = 3,
  MTLLibraryErrorCompileWarning = 4,
  MTLLibraryErrorFunctionNotFound = 5,
  MTLLibraryErrorFileNotFound = 6,
};

typedef NS_ENUM(NSUInteger, MTLLanguageVersion) {
  MTLLanguageVersion2_4 = 131076,
  MTLLanguageVersion3_0 = 196608,
  MTLLanguageVersion3_1 = 196609,
  MTLLanguageVersion3_2 = 196610,
  MTLLanguageVersion4_0 = 262144,
};

typedef NS_ENUM(NSInteger, MTLMathMode) {
  MTLMathModeSafe = 0,
  MTLMathModeRelaxed = 1,
  MTLMathModeFast = 2,
};

typedef NS_ENUM(NSInteger, MTLMathFloatingPointFunctions) {
  MTLMathFloatingPointFunctionsFast = 0,
  MTLMathFloatingPointFunctionsPrecise = 1,
};

typedef NS_ENUM(NSUInteger, MTLFunctionType) {
  MTLFunctionTypeVertex = 1,
  MTLFunctionTypeFragment = 2,
  MTLFunctionTypeKernel = 3,
};

@interface MTLCompileOptions : NSObject <NSCopying> {
  NSDictionary<NSString*, NSObject*>* _preprocessorMacros;
  BOOL _fastMathEnabled, _preserveInvariance;
  MTLMathMode _mathMode;
  MTLMathFloatingPointFunctions _mathFloatingPointFunctions;
  MTLLanguageVersion _languageVersion;
  NSUInteger _maxTotalThreadsPerThreadgroup;
}
@property(nonatomic, copy) NSDictionary<NSString*, NSObject*>* preprocessorMacros;
@property(nonatomic) BOOL fastMathEnabled;
@property(nonatomic) MTLMathMode mathMode;
@property(nonatomic) MTLMathFloatingPointFunctions mathFloatingPointFunctions;
@property(nonatomic) MTLLanguageVersion languageVersion;
@property(nonatomic) BOOL preserveInvariance;
@property(nonatomic) NSUInteger maxTotalThreadsPerThreadgroup;
@end

@interface MTLFunctionConstantValues : NSObject <NSCopying> {
  void* _values;
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type atIndex:(NSUInteger)index;
- (void)setConstantValues:(const void*)values type:(MTLDataType)type withRange:(NSRange)range;
- (void)setConstantValue:(const void*)value type:(MTLDataType)type withName:(NSString*)name;
- (void)reset;
@end

@interface MTLFunctionConstant : NSObject {
  NSString* _name;
  MTLDataType _type;
  NSUInteger _index;
  BOOL _required;
}
@property(readonly) NSString* name;
@property(readonly) MTLDataType type;
@property(readonly) NSUInteger index;
@property(readonly) BOOL required;
@end

@protocol MTLFunction <NSObject>
@property(copy) NSString* label;
@property(readonly) id<MTLDevice> device;
@property(readonly) MTLFunctionType functionType;
@property(readonly) NSString* name;
@property(readonly) NSDictionary<NSString*, MTLFunctionConstant*>* functionConstantsDictionary;
@end

@protocol MTLLibrary <NSObject>
@property(copy) NSString* label;
@property(readonly) id<MTLDevice> device;
@property(readonly) NSArray<NSString*>* functionNames;
- (id<MTLFunction>)newFunctionWithName:(NSString*)functionName;
- (id<MTLFunction>)newFunctionWithName:(NSString*)name
                        constantValues:(MTLFunctionConstantValues*)constantValues
                                 error:(NSError**)error;
@end
