/* http_json_client: a request by hand whose answer is JSON. */
#ifndef TANDEM_TESTS_HTTP_JSON_CLIENT_H
#define TANDEM_TESTS_HTTP_JSON_CLIENT_H
#include "http_client.h"
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

/* The answer, which must have that status; the caller's. headers: beside Content-Type, each with its CRLF. */
static inline json_t *client_json(uint16_t port, const char *method, const char *path, const char *headers,
                                  const char *body, int status)
{
    struct client c = client_open(port);
    char all[256];
    snprintf(all, sizeof all, "%sContent-Type: application/json\r\n", headers);
    client_request(&c, method, path, all, body);
    struct response r = client_response(&c, false);
    client_close(&c);
    if (r.status != status)
        fail_msg("%s %s: %d instead of %d: %s", method, path, r.status, status, r.body ? r.body : "");
    json_t *root = json_loads(r.body, 0, NULL);
    assert_non_null(root);
    free(r.body);
    return root;
}

#endif
