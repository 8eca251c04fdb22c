#ifndef SHARDD_CLIENT_C_HOST_QUIET_THREAD_H_
#define SHARDD_CLIENT_C_HOST_QUIET_THREAD_H_

#include <pthread.h>

namespace shardd {

// pthread_create of a thread of the library's that takes no signals: they are the program's, whose handlers expect its
// own threads. The error, as an errno value; 0: it runs.
int StartQuietThread(pthread_t* thread, void* (*main)(void*), void* argument);

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_HOST_QUIET_THREAD_H_
