//! TLS of a connection: its files are checked before the driver reads them, and a fault of a certificate is told with its remedy.

use mongodb::{
    error::{Error, ErrorKind},
    options::{AuthMechanism, ClientOptions, Tls, TlsOptions},
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};

use super::{ConnectError, StoreError, connect_error::invalid, uri};
use crate::base::causes;

/// Options that ask the server without TLS if these use it, or else with TLS and without a check of its certificate.
pub(super) fn the_other_way(options: &ClientOptions) -> ClientOptions {
    let mut other = options.clone();
    let unchecked = TlsOptions::builder().allow_invalid_certificates(true).build();
    other.tls = (!matches!(options.tls, Some(Tls::Enabled(_)))).then_some(Tls::Enabled(unchecked));
    other
}

/// What is wrong with TLS, and what to do, if that is why the connection failed.
pub(super) fn problem(options: &ClientOptions, answers_the_other_way: bool, failure: &StoreError) -> Option<&'static str> {
    match &options.tls {
        Some(Tls::Enabled(_)) if answers_the_other_way => Some(
            "the server does not use TLS: remove tls=true (or ssl=true) and the files for TLS from MONGODB_URI, or start mongod with --tlsMode requireTLS",
        ),
        Some(Tls::Enabled(tls)) => problem_of_certificate(&causes(failure).join(": "), tls.cert_key_file_path.is_some()),
        Some(Tls::Disabled) | None => answers_the_other_way.then_some(
            "the server uses TLS: write tls=true in MONGODB_URI, and tlsCAFile=FILE if its certificate is not from a public authority",
        ),
    }
}

/// A mongod with TLS 1.3 ends a connection without a word if it does not accept the client.
const ENDED: [&str; 2] = ["without sending TLS close_notify", "Connection reset by peer"];
const NOT_ACCEPTED: &str = "the server seems not to accept the certificate of the client (tlsCertificateKeyFile): it must be valid now, and signed by the authority in the server's --tlsCAFile; the log of mongod has the reason";
const WANTED: &str = "the server seems to want a certificate of the client: write tlsCertificateKeyFile=FILE in MONGODB_URI, a file with the certificate and its key; the log of mongod has the reason";

/// What a message of the TLS library means to a client that has sent a certificate, or has none.
fn problem_of_certificate(said: &str, has_certificate: bool) -> Option<&'static str> {
    let has = |parts: &[&str]| parts.iter().any(|part| said.contains(part));
    if has(&["alert: CertificateExpired", "alert: CertificateUnknown", "alert: BadCertificate", "alert: UnknownCA"]) {
        Some(NOT_ACCEPTED)
    } else if has(&["NotValidForName", "not valid for name"]) {
        Some(
            "the certificate of the server does not have the name of the host in MONGODB_URI: write the name that the certificate has, or give the server a certificate with this name as a subject alternative name",
        )
    } else if has(&["CaUsedAsEndEntity"]) {
        Some(
            "the server uses the certificate of an authority as its own: make an authority, let it sign a certificate for the server, and give only the authority's certificate in tlsCAFile",
        )
    } else if has(&["UnknownIssuer", "BadSignature"]) {
        Some(
            "the certificate of the server is not signed by a known authority: write tlsCAFile=FILE in MONGODB_URI, with the certificate of the authority that has signed it",
        )
    } else if has(&["Expired", "expired", "NotValidYet", "not valid yet"]) {
        Some("the certificate of the server is not valid now: renew it, and check the clocks of both machines")
    } else if has(&["CertificateRequired", "certificate required", "HandshakeFailure", "handshake failure"]) {
        Some(WANTED)
    } else if has(&ENDED) {
        Some(if has_certificate { NOT_ACCEPTED } else { WANTED })
    } else {
        None
    }
}

/// What a file for TLS must have, and what to do if it does not.
const PARTS_OF_FILES: [(&str, &str, &str); 3] = [
    (
        "tlsCAFile",
        "BEGIN CERTIFICATE",
        "write the file with the certificate of the authority that has signed the server's, in the format PEM",
    ),
    ("tlsCertificateKeyFile", "PRIVATE KEY", "write the certificate of the client and its key into one file, both in the format PEM"),
    ("tlsCertificateKeyFile", "BEGIN CERTIFICATE", "write the certificate of the client and its key into one file, both in the format PEM"),
];

/// Checks the files for TLS, which the driver would report as a fault of the network, or would use without what is damaged.
pub(super) fn check_files(options: &ClientOptions) -> Result<(), ConnectError> {
    let tls = if let Some(Tls::Enabled(tls)) = &options.tls { Some(tls) } else { None };
    if uses_x509(options) && tls.is_none_or(|tls| tls.cert_key_file_path.is_none()) {
        let remedy = "it needs tls=true and tlsCertificateKeyFile=FILE, a file with the certificate of the client and its key";
        return Err(ConnectError::UriOption { option: "authMechanism=MONGODB-X509".into(), remedy: remedy.into() });
    }
    let Some(tls) = tls else { return Ok(()) };
    for (option, needs, remedy) in PARTS_OF_FILES {
        let Some(file) = (if option == "tlsCAFile" { &tls.ca_file_path } else { &tls.cert_key_file_path }) else { continue };
        let refused = |problem| ConnectError::TlsFile { option: option.into(), file: file.clone(), problem };
        let bytes = std::fs::read(file).map_err(|error| {
            refused(format!("it cannot be read ({error}): correct its path, or let the user of this process read it (chown, chmod)"))
        })?;
        let text = String::from_utf8_lossy(&bytes);
        // A key with a password, in either of two formats.
        if ["BEGIN ENCRYPTED", "Proc-Type: 4,ENCRYPTED"].iter().any(|encrypted| text.contains(encrypted)) {
            return Err(refused(uri::DECRYPT.into()));
        }
        if !text.contains(needs) {
            return Err(refused(format!("the file has no line with `{needs}`: {remedy}")));
        }
        let is_key = needs == "PRIVATE KEY";
        let is_whole = if is_key { PrivateKeyDer::from_pem_slice(&bytes).is_ok() } else { has_whole_certificates(&bytes) };
        if !is_whole {
            // Without the parser's words, which may show a part of the file.
            return Err(refused(format!("the file is damaged in or before the part with `{needs}`: {remedy}")));
        }
    }
    Ok(())
}

/// At least one, and none that is damaged.
fn has_whole_certificates(pem: &[u8]) -> bool {
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem).collect();
    !found.is_empty() && found.iter().all(Result::is_ok)
}

pub(super) fn uses_x509(options: &ClientOptions) -> bool {
    options.credential.as_ref().is_some_and(|credential| credential.mechanism == Some(AuthMechanism::MongoDbX509))
}

/// What the driver says of the options, and of the files for TLS that it has read.
pub(super) fn refused_options(error: Error, options: &ClientOptions) -> ConnectError {
    match (error.kind.as_ref(), &options.tls) {
        (ErrorKind::InvalidTlsConfig { message, .. }, Some(Tls::Enabled(TlsOptions { cert_key_file_path: Some(file), .. }))) => {
            let problem = if message.contains("KeyMismatch") {
                "the key does not belong to the certificate: write the certificate of this key, as the first one in the file".into()
            } else {
                format!("it cannot be used ({message}): make a new certificate and a new key")
            };
            ConnectError::TlsFile { option: "tlsCertificateKeyFile".into(), file: file.clone(), problem }
        }
        _ => invalid(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the TLS library has said, as text of its errors.
    #[test]
    fn each_problem_of_a_certificate_has_its_remedy() {
        for (said, remedy) in [
            ("invalid peer certificate: Expired", Some("renew it")),
            (
                "invalid peer certificate: certificate expired: verification time 5 (UNIX), but certificate is not valid after 4",
                Some("renew it"),
            ),
            ("invalid peer certificate: certificate not valid yet: verification time 4", Some("check the clocks")),
            ("received fatal alert: CertificateRequired", Some("tlsCertificateKeyFile=FILE")),
            ("received fatal alert: HandshakeFailure", Some("tlsCertificateKeyFile=FILE")),
            ("received fatal alert: CertificateExpired", Some("not to accept the certificate of the client")),
            ("received fatal alert: UnknownCA", Some("not to accept the certificate of the client")),
            ("invalid peer certificate: UnknownIssuer", Some("tlsCAFile=FILE")),
            ("invalid peer certificate: BadSignature", Some("tlsCAFile=FILE")),
            ("invalid peer certificate: certificate not valid for name \"a\"", Some("subject alternative name")),
            ("invalid peer certificate: NotValidForName", Some("subject alternative name")),
            ("invalid peer certificate: Other(OtherError(CaUsedAsEndEntity))", Some("only the authority's certificate")),
            ("peer closed connection without sending TLS close_notify", Some("want a certificate of the client")),
            ("Connection reset by peer (os error 104)", Some("want a certificate of the client")),
            ("Connection refused (os error 111)", None),
        ] {
            let found = problem_of_certificate(said, false);
            assert_eq!(found.map(|found| remedy.is_some_and(|remedy| found.contains(remedy))), remedy.map(|_| true), "{said}: {found:?}");
        }
        let ended = problem_of_certificate("peer closed connection without sending TLS close_notify", true);
        assert!(ended.is_some_and(|said| said.contains("not to accept the certificate of the client")), "{ended:?}");
    }
}
