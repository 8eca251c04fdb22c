/* The C ABI from C: a version, and a refusal with its code and text. */
#include <stdio.h>
#include <string.h>

#include "client/c/shardd.h"

int main(void) {
  char* json = NULL;
  shardd_status* status = shardd_plan_json("{ not json", &json);
  const int code = shardd_status_code(status);
  printf("%s %d %s\n", shardd_version(), code, shardd_status_message(status));
  const int refused = code == 3 && strlen(shardd_status_message(status)) > 0; /* INVALID_ARGUMENT */
  shardd_status_free(status);
  return refused ? 0 : 1;
}
