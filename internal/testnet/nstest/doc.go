// Package nstest runs tests in network namespaces, without root.
//
// The package's TestMain calls [Main], each test that needs the kernel
// [Require], [New] or [Star]:
//
//	func TestMain(m *testing.M) { nstest.Main(m) }
//
//	func TestSomething(t *testing.T) {
//		ns := nstest.New(t)
//		…
//	}
//
// The files that do must be built for Linux alone.
package nstest
