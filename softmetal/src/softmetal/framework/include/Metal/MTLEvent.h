// Event types that torch's MPSEvent.h names; softmetal has no events, since a committed command buffer is
// done when -commit returns.
#pragma once
#import <Metal/MTLTypes.h>

@protocol MTLEvent <NSObject>
@property(readonly) id<MTLDevice> device;
@property(copy) NSString* label;
@end

@protocol MTLSharedEvent <MTLEvent>
@property(readwrite) uint64_t signaledValue;
@end

typedef void (^MTLSharedEventNotificationBlock)(id<MTLSharedEvent> event, uint64_t value);
