//! Certificates for the tests, made on the spot.

use std::path::Path;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber,
};

use crate::tls::TlsSettings;
use crate::transport::Security;

pub(super) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    pub(super) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Writes `{side}-cert.pem` and `{side}-key.pem`, changed by `change` before they are signed.
    pub(super) fn sign(&self, dir: &Path, side: &str, names: &[&str], change: impl FnOnce(&mut CertificateParams)) {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages = match side {
            "server" => vec![ExtendedKeyUsagePurpose::ServerAuth],
            _ => vec![ExtendedKeyUsagePurpose::ClientAuth],
        };
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(dir.join(format!("{side}-cert.pem")), certificate.pem()).unwrap();
        let path = dir.join(format!("{side}-key.pem"));
        std::fs::write(&path, key.serialize_pem()).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    }

    pub(super) fn revoke(&self, dir: &Path, serials: &[SerialNumber]) {
        let now = SystemTime::now();
        let revoked = |serial: &SerialNumber| RevokedCertParams {
            serial_number: serial.clone(),
            revocation_time: now.into(),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: now.into(),
            next_update: (now + Duration::from_secs(3600)).into(),
            crl_number: SerialNumber::from(1u64),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        std::fs::write(dir.join("ca-crl.pem"), list.signed_by(&self.issuer).unwrap().pem().unwrap()).unwrap();
    }
}

/// A directory with both sides' certificates from one authority.
pub(super) struct Site {
    dir: tempfile::TempDir,
    pub(super) authority: Authority,
}

impl Site {
    pub(super) fn new() -> Self {
        let site = Self { dir: tempfile::tempdir().unwrap(), authority: Authority::new() };
        std::fs::write(site.path().join("ca-cert.pem"), &site.authority.pem).unwrap();
        site.authority.sign(site.path(), "server", &["localhost", "127.0.0.1"], |_| {});
        site.authority.sign(site.path(), "client", &["source.example"], |_| {});
        site
    }

    pub(super) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(super) fn client(&self) -> Security {
        Security::Tls(TlsSettings::client(self.path()).unwrap())
    }

    pub(super) fn server(&self, allow: &str) -> Security {
        Security::Tls(TlsSettings::server(self.path(), &[allow.to_owned()]).unwrap())
    }
}
