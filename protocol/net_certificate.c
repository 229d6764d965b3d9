/* net_certificate: certificates as files and as a server shows them, looked at so that a line can say what is wrong with them. */
#include "protocol/net_internal.h"
#include "shared/crypto.h"
#include "shared/log.h"
#include <errno.h>
#include <fcntl.h>
#include <mbedtls/pk.h>
#include <mbedtls/x509_crt.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define DATE_SIZE 48

static int random_bytes(void *ctx, unsigned char *out, size_t size)
{
    (void)ctx;
    return crypto_random(out, size);
}

static int check_readable(const char *what, const char *path, struct td_error *err)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK), code = 0;
    if (fd < 0 || fstat(fd, &st) < 0)
        code =
            td_fail(err, -TD_ERR_NOTFOUND, "cannot read the %s %s: %s (deploy/certs.sh makes certificates)",
                    what, path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        code = td_fail(err, -TD_ERR_ARG,
                       "cannot read the %s %s: it is not a regular file (deploy/certs.sh makes certificates)",
                       what, path);
    if (fd >= 0)
        close(fd);
    return code;
}

int net_check_authority(const char *ca_path, struct td_error *err)
{
    int code = check_readable("CA certificate", ca_path, err);
    if (code)
        return code;
    mbedtls_x509_crt crt;
    mbedtls_x509_crt_init(&crt);
    if (mbedtls_x509_crt_parse_file(&crt, ca_path) < 0)
        code = td_fail(err, -TD_ERR_FORMAT,
                       "%s holds no PEM certificate (deploy/certs.sh makes certificates)", ca_path);
    mbedtls_x509_crt_free(&crt);
    return code;
}

int net_check_files(const char *ca_path, const char *cert_path, const char *key_path, struct td_error *err)
{
    if (!cert_path != !key_path)
        return td_fail(err, -TD_ERR_ARG,
                       "a client certificate needs both the certificate and its private key");
    int code = ca_path ? net_check_authority(ca_path, err) : 0;
    if (code == 0 && cert_path)
        code = net_check_certificate(cert_path, key_path, err);
    return code;
}

static const char *date_text(const mbedtls_x509_time *t, char out[DATE_SIZE])
{
    snprintf(out, DATE_SIZE, "%04d-%02d-%02d %02d:%02d UTC", t->year, t->mon, t->day, t->hour, t->min);
    return out;
}

bool net_certificate_dates(const void *der, size_t size, char *out, size_t out_size)
{
    mbedtls_x509_crt crt;
    char date[DATE_SIZE], today[DATE_SIZE] = "?";
    time_t now = time(NULL);
    struct tm utc;
    if (gmtime_r(&now, &utc))
        strftime(today, sizeof today, "%Y-%m-%d", &utc);
    mbedtls_x509_crt_init(&crt);
    bool read = mbedtls_x509_crt_parse_der(&crt, der, size) == 0;
    if (read && mbedtls_x509_time_is_past(&crt.valid_to))
        snprintf(
            out, out_size,
            "the server's certificate expired on %s (today is %s by this clock): renew it at the node, as "
            "with deploy/certs.sh, and start the node again",
            date_text(&crt.valid_to, date), today);
    else if (read && mbedtls_x509_time_is_future(&crt.valid_from))
        snprintf(out, out_size,
                 "the server's certificate is valid from %s on (today is %s by this clock): set the clock",
                 date_text(&crt.valid_from, date), today);
    else if (read) /* then one above it is */
        snprintf(
            out, out_size,
            "the authority of the server's certificate has expired or is not valid yet (today is %s by this "
            "clock): deploy/certs.sh --force makes another, whose ca.crt clients need too",
            today);
    mbedtls_x509_crt_free(&crt);
    return read;
}

int net_check_certificate(const char *cert_path, const char *key_path, struct td_error *err)
{
    char date[DATE_SIZE];
    int code = check_readable("certificate", cert_path, err);
    if (code == 0)
        code = check_readable("private key", key_path, err);
    if (code)
        return code;
    mbedtls_x509_crt crt;
    mbedtls_pk_context key;
    mbedtls_x509_crt_init(&crt);
    mbedtls_pk_init(&key);
    if (mbedtls_x509_crt_parse_file(&crt, cert_path) != 0)
        code = td_fail(err, -TD_ERR_FORMAT,
                       "%s holds no PEM certificate (deploy/certs.sh makes certificates)", cert_path);
    else if (mbedtls_pk_parse_keyfile(&key, key_path, NULL, random_bytes, NULL) != 0)
        code = td_fail(err, -TD_ERR_FORMAT, "%s holds no usable private key (PEM, no password)", key_path);
    else if (mbedtls_pk_check_pair(&crt.pk, &key, random_bytes, NULL) != 0)
        code = td_fail(err, -TD_ERR_MISMATCH, "the private key %s does not belong to the certificate %s",
                       key_path, cert_path);
    else if (crt.next)
        log_warn("net",
                 "%s holds several certificates: only the first is used, so it must be signed by an "
                 "authority that clients know",
                 cert_path);
    else if (mbedtls_x509_time_is_past(&crt.valid_to))
        log_warn("net", "the certificate %s expired on %s: clients refuse it (deploy/certs.sh renews it)",
                 cert_path, date_text(&crt.valid_to, date));
    mbedtls_pk_free(&key);
    mbedtls_x509_crt_free(&crt);
    return code;
}
