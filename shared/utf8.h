/* utf8: decoding one code point at a time from text that may be damaged, and the classes that pre-tokenizers
 * ask for. (utf8_complete and utf8_valid are declared in tokenizer.h.) */
#ifndef TANDEM_SHARED_UTF8_H
#define TANDEM_SHARED_UTF8_H
#include <stddef.h>
#include <stdint.h>

#define UTF8_INVALID UINT32_MAX

enum char_class { CHAR_OTHER, CHAR_LETTER, CHAR_NUMBER, CHAR_SPACE }; /* \p{L}, \p{N}, \s of Unicode 15.1 */

/* utf8_decode: bytes of the sequence at data[0..size), size > 0. *code_point is UTF8_INVALID, and the result
 * 1, for a byte that begins no well-formed sequence (Unicode 15.1, table 3-7: no overlong forms, no
 * surrogates). */
size_t utf8_decode(const char *data, size_t size, uint32_t *code_point);

/* Invalid bytes and unassigned code points are CHAR_OTHER. */
enum char_class unicode_class(uint32_t code_point);

#endif
