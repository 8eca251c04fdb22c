#include "client/c/host/quiet_thread.h"

#include <signal.h>

namespace shardd {

int StartQuietThread(pthread_t* thread, void* (*main)(void*), void* argument) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(thread, nullptr, main, argument);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return error;
}

}  // namespace shardd
