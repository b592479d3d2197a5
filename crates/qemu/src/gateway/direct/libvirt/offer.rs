//! The opening message of a source whose QEMU belongs to libvirt: what libvirt at the destination needs to start the domain.

use serde::{Deserialize, Serialize};
use sterna_libvirt::{Domain, Job, Xml};
use sterna_wire::limits::MAX_OPENING;
use sterna_wire::text::cleaned;

/// A domain, as JSON. The destination ignores fields that it does not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::gateway) struct Offer {
    /// The domain's name.
    name: String,
    /// The domain's UUID.
    uuid: String,
    /// The domain's description, as libvirt passes it between hosts.
    xml: String,
}

impl Offer {
    /// Describes a domain of this host.
    ///
    /// # Errors
    /// The domain cannot be moved, or libvirt does not describe it.
    pub(in crate::gateway) fn of(domain: &Domain) -> Result<Self, String> {
        let failed = |error: sterna_libvirt::Error| error.to_string();
        if domain.job().map_err(failed)? == Job::UnderWay {
            return Err(format!(
                "libvirt has a job under way on domain {} (virsh domjobinfo shows it): wait until it has finished, or end it (virsh \
                 domjobabort)",
                domain.name()
            ));
        }
        let uuid = domain.uuid().map_err(failed)?;
        let xml = domain.xml(Xml::Migratable).map_err(failed)?;
        Ok(Self { name: domain.name().to_owned(), uuid, xml })
    }

    /// Returns the message.
    ///
    /// # Errors
    /// It is longer than an opening message may be.
    pub(in crate::gateway) fn encode(&self) -> Result<Vec<u8>, String> {
        let bytes = serde_json::to_vec(self).expect("texts can be written as JSON");
        if bytes.len() > MAX_OPENING {
            return Err(format!(
                "the description of domain {} has {} bytes as JSON; up to {MAX_OPENING} are possible",
                self.name,
                bytes.len()
            ));
        }
        Ok(bytes)
    }

    /// Reads a message. It comes from another host: libvirt checks the description, and the name is checked here, because texts show it.
    ///
    /// # Errors
    /// The source is not one whose QEMU belongs to libvirt, or its message is damaged.
    pub(in crate::gateway) fn decode(message: &[u8]) -> Result<Self, String> {
        if message.is_empty() {
            return Err(
                "libvirt is to start the guest here, and the source's QEMU is not libvirt's (sterna send --libvirt)"
                    .into(),
            );
        }
        let offer: Self = serde_json::from_slice(message).map_err(|error| {
            format!("the source's description of its domain is damaged: {}", cleaned(&error.to_string()))
        })?;
        let Self { name, uuid, xml } = &offer;
        if name.is_empty() || cleaned(name) != *name || [name, uuid, xml].iter().any(|text| text.contains('\0')) {
            return Err(format!("the source's domain has a name that is not possible: {}", cleaned(name)));
        }
        Ok(offer)
    }

    /// Returns the domain's name.
    pub(in crate::gateway) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the domain's UUID.
    pub(in crate::gateway) fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Returns the domain's description. It has secrets.
    pub(in crate::gateway) fn xml(&self) -> &str {
        &self.xml
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(name: &str, xml: &str) -> Offer {
        Offer { name: name.into(), uuid: "6a9e0d3c-5b7c-4a51-9d53-006775657374".into(), xml: xml.into() }
    }

    #[test]
    fn a_domain_is_read_as_it_was_described() {
        let domain = offer("web \"1\"", "<domain type='kvm'>\n</domain>\n");
        assert_eq!(Offer::decode(&domain.encode().unwrap()).unwrap(), domain);
    }

    #[test]
    fn a_description_that_is_too_long_is_refused_before_the_destination_is_contacted() {
        let error = offer("web", &"x".repeat(MAX_OPENING)).encode().unwrap_err();
        assert!(error.contains("the description of domain web has 656"), "{error}");
    }

    #[test]
    fn messages_that_describe_no_domain_are_refused() {
        assert!(Offer::decode(b"").unwrap_err().contains("sterna send --libvirt"));
        assert!(Offer::decode(b"{\"name\": 1}").unwrap_err().contains("damaged"));
        for name in ["", "a\u{1b}[31m", "a\0"] {
            let message = offer(name, "<domain/>").encode().unwrap();
            assert!(Offer::decode(&message).unwrap_err().contains("not possible"), "{name:?}");
        }
    }
}
