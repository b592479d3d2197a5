//! What crosses into C: structures, numbers and functions, as the header `qatzip.h` of QATzip 1.3.1 (API 2.5) lays them down.
//! Written anew from that header; [`crate::library`] proves the layouts on the library that was really found.

use std::ffi::{c_int, c_long, c_uchar, c_uint, c_ulong, c_void};

/// `QzSession_T`. Zeroed by the caller; the library keeps its own state behind `internal`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct QzSession {
    pub(crate) hw_session_stat: c_long,
    pub(crate) thd_sess_stat: c_int,
    pub(crate) internal: *mut c_void,
    pub(crate) total_in: c_ulong,
    pub(crate) total_out: c_ulong,
}

impl QzSession {
    pub(crate) const EMPTY: QzSession =
        QzSession { hw_session_stat: 0, thd_sess_stat: 0, internal: std::ptr::null_mut(), total_in: 0, total_out: 0 };
}

/// `QzSessionParamsCommon_T`. The header's enumerations are C `int`s without negative members.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Common {
    pub(crate) direction: c_uint,
    pub(crate) comp_lvl: c_uint,
    pub(crate) comp_algorithm: c_uchar,
    pub(crate) max_forks: c_uint,
    pub(crate) sw_backup: c_uchar,
    pub(crate) hw_buff_sz: c_uint,
    pub(crate) strm_buff_sz: c_uint,
    pub(crate) input_sz_thrshold: c_uint,
    pub(crate) req_cnt_thrshold: c_uint,
    pub(crate) wait_cnt_thrshold: c_uint,
    pub(crate) polling_mode: c_uint,
    pub(crate) is_sensitive_mode: c_uint,
}

/// `QzSessionParamsDeflate_T`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Deflate {
    pub(crate) common: Common,
    pub(crate) huffman_hdr: c_uint,
    pub(crate) data_fmt: c_uint,
}

/// `QzSessionParamsDeflateExt_T`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeflateExt {
    pub(crate) deflate: Deflate,
    pub(crate) stop_decompression_stream_end: c_uchar,
    pub(crate) zlib_format: c_uchar,
}

// `QzDirection_T`, `QzHuffmanHdr_T`, `QzDataFormat_T`, `QzPollingMode_T`.
pub(crate) const DIRECTION_COMPRESS: c_uint = 0;
pub(crate) const DIRECTION_DECOMPRESS: c_uint = 1;
pub(crate) const DIRECTION_BOTH: c_uint = 2;
pub(crate) const HUFFMAN_DYNAMIC: c_uint = 0;
pub(crate) const FORMAT_GZIP_EXT: c_uint = 2;
pub(crate) const POLLING_PERIODICAL: c_uint = 0;
/// `QZ_DEFLATE`.
pub(crate) const ALGORITHM_DEFLATE: c_uchar = 8;
/// `PINNED_MEM`.
pub(crate) const PINNED: c_int = 1;
/// `QZ_AUTO_SELECT_NUMA_NODE`.
pub(crate) const NODE_OF_THIS_CPU: c_int = -1;
/// `LOG_NONE`.
pub(crate) const LOG_NONE: c_uint = 0;

pub(crate) const OK: c_int = 0;
pub(crate) const DUPLICATE: c_int = 1;
pub(crate) const DATA_ERROR: c_int = -4;
/// `QZ_NO_HW`, as a session's `hw_session_stat`.
pub(crate) const NO_HW: c_long = 11;

/// What the library hands out unless told otherwise (`QZ_*_DEFAULT` of the header; `max_forks` 3, 32 requests in flight). Sizes and
/// values together tell one layout from another.
pub(crate) const DEFAULTS: DeflateExt = DeflateExt {
    deflate: Deflate {
        common: Common {
            direction: DIRECTION_BOTH,
            comp_lvl: 1,
            comp_algorithm: ALGORITHM_DEFLATE,
            max_forks: 3,
            sw_backup: 1,
            hw_buff_sz: 64 << 10,
            strm_buff_sz: 64 << 10,
            input_sz_thrshold: 1024,
            req_cnt_thrshold: 32,
            wait_cnt_thrshold: 8,
            polling_mode: POLLING_PERIODICAL,
            is_sensitive_mode: 0,
        },
        huffman_hdr: HUFFMAN_DYNAMIC,
        data_fmt: FORMAT_GZIP_EXT,
    },
    stop_decompression_stream_end: 0,
    zlib_format: 0,
};

/// `qzInit`.
pub(crate) type Init = unsafe extern "C" fn(*mut QzSession, c_uchar) -> c_int;
/// `qzGetDefaultsDeflateExt` and `qzSetupSessionDeflateExt` without its session.
pub(crate) type Defaults = unsafe extern "C" fn(*mut DeflateExt) -> c_int;
/// `qzSetupSessionDeflateExt`.
pub(crate) type Setup = unsafe extern "C" fn(*mut QzSession, *mut DeflateExt) -> c_int;
/// `qzTeardownSession`.
pub(crate) type Teardown = unsafe extern "C" fn(*mut QzSession) -> c_int;
/// `qzCompress`, and with the same arguments the library's own software path.
pub(crate) type Compress =
    unsafe extern "C" fn(*mut QzSession, *const c_uchar, *mut c_uint, *mut c_uchar, *mut c_uint, c_uint) -> c_int;
/// `qzDecompress`, and with the same arguments the library's own software path.
pub(crate) type Decompress =
    unsafe extern "C" fn(*mut QzSession, *const c_uchar, *mut c_uint, *mut c_uchar, *mut c_uint) -> c_int;
/// `qzGetDeflateEndOfStream`.
pub(crate) type EndOfStream = unsafe extern "C" fn(*mut QzSession, *mut c_uchar) -> c_int;
/// `qzMalloc`.
pub(crate) type Malloc = unsafe extern "C" fn(usize, c_int, c_int) -> *mut c_void;
/// `qzFree`.
pub(crate) type Free = unsafe extern "C" fn(*mut c_void);
/// `qzSetLogLevel`.
pub(crate) type SetLogLevel = unsafe extern "C" fn(c_uint) -> c_uint;

/// The header's word for a return code.
pub(crate) fn meaning(code: c_int) -> &'static str {
    match code {
        2 => "forced to software",
        -1 => "invalid parameter",
        -2 => "unspecified error",
        -3 => "buffer too small",
        -4 => "input is corrupt",
        -5 => "timed out",
        -100 => "integrity check failed",
        11 | -101 => "no QAT hardware",
        12 | -102 => "no memory driver",
        13 | -103 => "no instance to attach to",
        14 | 15 | -104 => "not enough pinned memory",
        16 | -116 => "format not supported by the device",
        -105 => "no software to fall back to",
        -200 => "not supported",
        _ => "unknown code",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn structures_have_the_sizes_and_offsets_a_c_compiler_gives_the_header_on_lp64() {
        assert_eq!((size_of::<QzSession>(), offset_of!(QzSession, internal)), (40, 16));
        assert_eq!((size_of::<Common>(), offset_of!(Common, max_forks), offset_of!(Common, hw_buff_sz)), (48, 12, 20));
        assert_eq!((size_of::<Deflate>(), size_of::<DeflateExt>()), (56, 60));
        assert_eq!(offset_of!(DeflateExt, zlib_format), 57);
    }
}
