/*
 * A device made with libvfio-user, for the tests of the vfio-user consumer: `libvfio_user SOCKET`.
 *
 * Region 0 is its state. A write of an I/O address to region 1 has it write that address there, in guest memory. While it runs and is
 * saved it gives all of its state once, and then what changes; when it stands, the rest and an end. Pieces of state are an offset, a
 * length, and so many bytes; the end is a piece of no bytes behind the state. It takes a state only with its end.
 */
#include <err.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <syslog.h>

#include "libvfio-user.h"

#define STATE (256 * 1024)
#define PIECE 1024
#define PIECES (STATE / PIECE)

struct piece {
	uint32_t offset, length;
};

static unsigned char state[STATE];
/* Pieces that have to be given. */
static bool due[PIECES];
static bool saving, stopped, end_given, end_taken;
/* What was made ready of the stream and not yet read, and what came of a piece that is not whole. */
static unsigned char out[sizeof(struct piece) + PIECE], in[sizeof(struct piece) + PIECE];
static size_t out_from, out_to, in_length;

static ssize_t state_access(vfu_ctx_t *ctx, char *bytes, size_t count, loff_t offset, bool write)
{
	(void)ctx;
	if (offset < 0 || (size_t)offset + count > STATE) {
		errno = EINVAL;
		return -1;
	}
	if (!write) {
		memcpy(bytes, state + offset, count);
		return count;
	}
	memcpy(state + offset, bytes, count);
	for (size_t at = offset / PIECE; at <= (offset + count - 1) / PIECE; at++)
		due[at] = true;
	return count;
}

static ssize_t dma_access(vfu_ctx_t *ctx, char *bytes, size_t count, loff_t offset, bool write)
{
	uint64_t iova;
	struct iovec iov;
	dma_sg_t *sg = alloca(dma_sg_size());

	if (!write || count != sizeof iova || offset != 0) {
		errno = EINVAL;
		return -1;
	}
	memcpy(&iova, bytes, sizeof iova);
	if (vfu_addr_to_sgl(ctx, (vfu_dma_addr_t)iova, sizeof iova, sg, 1, PROT_WRITE) != 1 ||
	    vfu_sgl_get(ctx, sg, &iov, 1, 0) != 0)
		return -1;
	memcpy(iov.iov_base, &iova, sizeof iova);
	vfu_sgl_mark_dirty(ctx, sg, 1);
	vfu_sgl_put(ctx, sg, &iov, 1);
	return count;
}

static int transition(vfu_ctx_t *ctx, vfu_migr_state_t to)
{
	(void)ctx;
	switch (to) {
	case VFU_MIGR_STATE_PRE_COPY:
	case VFU_MIGR_STATE_STOP_AND_COPY:
		stopped = to == VFU_MIGR_STATE_STOP_AND_COPY;
		if (!saving) {
			saving = true;
			end_given = false;
			out_from = out_to = 0;
			memset(due, true, sizeof due);
		}
		return 0;
	case VFU_MIGR_STATE_RESUME:
		in_length = 0;
		end_taken = false;
		saving = false;
		memset(state, 0, sizeof state);
		stopped = true;
		return 0;
	case VFU_MIGR_STATE_STOP:
		/* From RESUME: nothing of it may be missing. */
		if (!saving && stopped && !end_taken) {
			errno = EINVAL;
			return -1;
		}
		saving = false;
		return 0;
	case VFU_MIGR_STATE_RUNNING:
		saving = stopped = false;
		end_taken = true;
		return 0;
	}
	errno = EINVAL;
	return -1;
}

/* Makes the next piece ready; false: there is none now, or none any more. */
static bool next_piece(void)
{
	struct piece piece = { STATE, 0 };

	for (size_t at = 0; at < PIECES && piece.length == 0; at++) {
		if (due[at]) {
			piece = (struct piece){ at * PIECE, PIECE };
			memcpy(out + sizeof piece, state + piece.offset, PIECE);
			due[at] = false;
		}
	}
	if (piece.length == 0 && (!stopped || end_given))
		return false;
	end_given = piece.length == 0;
	memcpy(out, &piece, sizeof piece);
	out_from = 0;
	out_to = sizeof piece + piece.length;
	return true;
}

static ssize_t read_data(vfu_ctx_t *ctx, void *bytes, uint64_t count)
{
	size_t length;

	(void)ctx;
	if (out_from == out_to && !next_piece())
		return 0;
	/* A piece at most: less than was asked for, and yet not the end. */
	length = out_to - out_from < count ? out_to - out_from : count;
	memcpy(bytes, out + out_from, length);
	out_from += length;
	return length;
}

static ssize_t write_data(vfu_ctx_t *ctx, void *bytes, uint64_t count)
{
	(void)ctx;
	for (uint64_t at = 0; at < count; at++) {
		struct piece piece;

		in[in_length++] = ((unsigned char *)bytes)[at];
		if (in_length < sizeof piece)
			continue;
		memcpy(&piece, in, sizeof piece);
		if (end_taken || piece.length > PIECE || piece.offset > STATE - piece.length) {
			errno = EINVAL;
			return -1;
		}
		if (in_length == sizeof piece + piece.length) {
			memcpy(state + piece.offset, in + sizeof piece, piece.length);
			end_taken = piece.length == 0;
			in_length = 0;
		}
	}
	return count;
}

static int reset(vfu_ctx_t *ctx, vfu_reset_type_t type)
{
	(void)ctx;
	(void)type;
	memset(state, 0, sizeof state);
	return 0;
}

static void mapped(vfu_ctx_t *ctx, vfu_dma_info_t *info)
{
	(void)ctx;
	(void)info;
}

static void say(vfu_ctx_t *ctx, int level, const char *text)
{
	(void)ctx;
	(void)level;
	fprintf(stderr, "libvfio-user: %s\n", text);
}

int main(int argc, char **argv)
{
	const vfu_migration_callbacks_t callbacks = {
		.version = VFU_MIGR_CALLBACKS_VERS,
		.transition = transition,
		.read_data = read_data,
		.write_data = write_data,
	};
	vfu_ctx_t *ctx;

	if (argc != 2)
		errx(1, "usage: %s SOCKET", argv[0]);
	ctx = vfu_create_ctx(VFU_TRANS_SOCK, argv[1], 0, NULL, VFU_DEV_TYPE_PCI);
	if (ctx == NULL || vfu_setup_log(ctx, say, LOG_ERR) < 0 ||
	    vfu_pci_init(ctx, VFU_PCI_TYPE_CONVENTIONAL, PCI_HEADER_TYPE_NORMAL, 0) < 0 ||
	    vfu_setup_region(ctx, VFU_PCI_DEV_BAR0_REGION_IDX, STATE, state_access, VFU_REGION_FLAG_RW, NULL, 0, -1, 0) < 0 ||
	    vfu_setup_region(ctx, VFU_PCI_DEV_BAR1_REGION_IDX, 8, dma_access, VFU_REGION_FLAG_RW, NULL, 0, -1, 0) < 0 ||
	    vfu_setup_device_migration_callbacks(ctx, &callbacks) < 0 || vfu_setup_device_reset_cb(ctx, reset) < 0 ||
	    vfu_setup_device_dma(ctx, 16, mapped, mapped) < 0 || vfu_realize_ctx(ctx) < 0)
		err(1, "no device");
	puts("ready");
	fflush(stdout);
	if (vfu_attach_ctx(ctx) < 0)
		err(1, "no client");
	while (vfu_run_ctx(ctx) == 0)
		;
	vfu_destroy_ctx(ctx);
	return 0;
}
