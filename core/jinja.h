/* The part of Jinja2 that chat templates use, as transformers sets it up (trim_blocks, lstrip_blocks,
 * loop controls, {% generation %}). What is outside it is refused with its line and name. */
#ifndef QL_JINJA_H
#define QL_JINJA_H

#include "core/unicode.h"

#include <jansson.h>

typedef struct ql_jinja ql_jinja;
ql_status ql_jinja_compile(const char *text, size_t n, ql_jinja **out) QL_MUST_USE;
void ql_jinja_free(ql_jinja *t);
bool ql_jinja_has_generation(const ql_jinja *t); /* it has {% generation %} blocks */

/* Called with the byte range of each {% generation %} block in the output. */
typedef ql_status ql_jinja_span(void *user, size_t start, size_t end);

/* Appends the text. context: an object, the variables. A template that never ends or grows without bound
 * is stopped. span may be NULL. */
ql_status ql_jinja_render(const ql_jinja *t, const json_t *context, ql_jinja_span *span, void *user,
                          ql_str *out) QL_MUST_USE;

#endif
