/* Stands in for QATzip with a device behind it: what its public calls do there, with stored blocks for compression. The first bytes
 * of a job's input make it misbehave, each in a way that its sources allow. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { long stat; int thread; void *internal; unsigned long in, out; } session;
typedef struct {
    unsigned direction, level; unsigned char algorithm; unsigned forks; unsigned char backup;
    unsigned buffer, stream, threshold, requests, wait, polling, sensitive, huffman, format;
    unsigned char stop, zlib;
} params;

static uint32_t crc_of(const unsigned char *p, unsigned n)
{
    uint32_t crc = ~0u;
    while (n--) {
        crc ^= *p++;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}

static void put(unsigned char *at, uint32_t v) { memcpy(at, &v, 4); }
static uint32_t get(const unsigned char *at) { uint32_t v; memcpy(&v, at, 4); return v; }

int hits_of_init, software_calls, sessions, gate;

int qzInit(session *s, unsigned char backup) { hits_of_init++; return 0; }
unsigned qzSetLogLevel(unsigned level) { return level; }
void *qzMalloc(size_t size, int node, int pinned) { return node == -1 ? NULL : malloc(size); }
void qzFree(void *memory) { free(memory); }

int qzGetDefaultsDeflateExt(params *p)
{
    *p = (params){ 2, 1, 8, 3, 1, 65536, 65536, 1024, 32, 8, 0, 0, 0, 2, 0, 0 };
    return 0;
}

int qzSetupSessionDeflateExt(session *s, params *p)
{
    if (p->forks != 0 && p->forks != 3) return -1;
    __atomic_add_fetch(&sessions, 1, __ATOMIC_SEQ_CST);
    s->internal = malloc(sizeof *p);
    memcpy(s->internal, p, sizeof *p);
    s->stat = 0;
    return 0;
}

int qzTeardownSession(session *s)
{
    __atomic_sub_fetch(&sessions, 1, __ATOMIC_SEQ_CST);
    free(s->internal);
    s->internal = NULL;
    return 0;
}

int qzGetDeflateEndOfStream(session *s, unsigned char *end) { *end = 0; return 0; }

/* A run of one byte in a block of fixed codes (RFC 1951, 3.2.6): the literal, then matches of 258 at distance 1. */
static unsigned bits_of_run(unsigned char *at, unsigned char byte, unsigned n)
{
    uint64_t hold = 3; /* last block, fixed codes */
    unsigned held = 3, used = 0;
    #define BITS(code, count) for (int b = (count) - 1; b >= 0; b--) { \
        hold |= (uint64_t)((code) >> b & 1) << held++; \
        if (held == 8) at[used++] = hold, hold = 0, held = 0; }
    BITS(0x30 + byte, 8);
    for (n--; n >= 258; n -= 258) { BITS(0xc5, 8); BITS(0, 5); }
    for (; n; n--) BITS(0x30 + byte, 8);
    BITS(0, 7);
    if (held) at[used++] = hold;
    return used;
}

/* One member per 60 000 bytes: of one stored block, or of a run where it is one of a small byte. */
static int pack(session *s, const unsigned char *src, unsigned *src_len, unsigned char *dst, unsigned *room, int hardware)
{
    static const unsigned char header[16] = { 31, 139, 8, 4, 0, 0, 0, 0, 0, 255, 12, 0, 'Q', 'Z', 8, 0 };
    unsigned left = *src_len, used = 0;
    do {
        unsigned n = left < 60000 ? left : 60000;
        if (used + n + 37 > *room) return -3;
        unsigned char *m = dst + used;
        memcpy(m, header, 16);
        put(m + 16, n);
        unsigned body;
        if (n > 1 && src[0] < 144 && !memcmp(src, src + 1, n - 1)) {
            body = bits_of_run(m + 24, src[0], n);
        } else {
            body = n + 5;
            m[24] = 1;
            m[25] = n, m[26] = n >> 8, m[27] = ~n, m[28] = ~n >> 8;
            memcpy(m + 29, src, n);
        }
        put(m + 20, body);
        put(m + 24 + body, crc_of(src, n));
        put(m + 28 + body, n);
        src += n, left -= n, used += body + 32;
    } while (left);
    *room = used;
    if (hardware) s->in += *src_len, s->out += used;
    return 0;
}

static int unpack(session *s, const unsigned char *src, unsigned *src_len, unsigned char *dst, unsigned *room, int hardware)
{
    unsigned read = 0, wrote = 0;
    while (read < *src_len) {
        unsigned n = get(src + read + 16);
        if (get(src + read + 20) != n + 5 || wrote + n > *room) return -2;
        memcpy(dst + wrote, src + read + 29, n);
        if (crc_of(dst + wrote, n) != get(src + read + 29 + n)) return -4;
        read += n + 37, wrote += n;
    }
    if (wrote >= 5 && !memcmp(dst, "SHORT", 5)) wrote -= 5;
    *src_len = read, *room = wrote;
    if (hardware) s->in += read, s->out += wrote;
    return 0;
}

int qzCompress(session *s, const unsigned char *src, unsigned *src_len, unsigned char *dst, unsigned *room, unsigned last)
{
    if (*src_len >= 5) {
        if (!memcmp(src, "HANGS", 5)) for (;;) pause();
        if (!memcmp(src, "GATED", 5)) while (!__atomic_load_n(&gate, __ATOMIC_SEQ_CST)) usleep(100);
        if (!memcmp(src, "SOFTW", 5)) return pack(s, src, src_len, dst, room, 0);
        if (!memcmp(src, "BROKE", 5)) { *src_len = *room = 0; return -2; }
        if (!memcmp(src, "TIMED", 5)) { *src_len = *room = 0; return -5; }
        if (!memcmp(src, "PARTS", 5)) { *src_len -= 1; return pack(s, src, src_len, dst, room, 1); }
        if (!memcmp(src, "LARGE", 5)) { *room = 0x7fffffff; return 0; }
        if (!memcmp(src, "EMPTY", 5)) { *room = 0; s->in += *src_len; return 0; }
    }
    return pack(s, src, src_len, dst, room, 1);
}

int qzDecompress(session *s, const unsigned char *src, unsigned *src_len, unsigned char *dst, unsigned *room)
{
    return unpack(s, src, src_len, dst, room, 1);
}

int qzSWCompress(session *s, const unsigned char *src, unsigned *src_len, unsigned char *dst, unsigned *room, unsigned last)
{
    abort(); /* with a device the public call decides */
}

/* Only what does not say its lengths comes here; the tests' such members say "plain". */
int qzSWDecompressMulti(session *s, const unsigned char *src, unsigned *src_len, unsigned char *dst, unsigned *room)
{
    __atomic_add_fetch(&software_calls, 1, __ATOMIC_SEQ_CST);
    memcpy(dst, "plain", 5);
    *room = 5;
    return 0;
}
